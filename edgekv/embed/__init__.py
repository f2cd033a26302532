"""Embedders and rerankers: what goes into their bundles, and what is made of what comes out."""

from __future__ import annotations

from edgekv.embed.embedder import Embedder as Embedder, pooled as pooled
from edgekv.embed.pack import Pack as Pack, packed as packed
from edgekv.embed.ranker import (
    RankedDocument as RankedDocument,
    Ranker as Ranker,
    activated as activated,
    pair_tokens as pair_tokens,
)
from edgekv.embed.reader import ReadText as ReadText
