"""Where the embedding and the head of a divided decoder are; see `exporters.graphs.split`."""

from __future__ import annotations

from typing import Literal

EmbeddingPlace = Literal["graph", "host"]
HeadPlace = Literal["own", "last"]
