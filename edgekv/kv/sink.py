"""The first tokens of every sequence, which no graph computes: their rows are constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from edgekv.kv.arena import Rows


@dataclass(frozen=True, slots=True)
class Sink:
    """Rows that an empty cache begins with.

    Attributes:
        tokens: ids, n of them.
        rows: keys and values `[n, D]`, in the integers of the cache, by the name of the graph input that reads them.
        logits: integers `[n, V]`, after each of the tokens.
    """

    tokens: tuple[int, ...]
    rows: Mapping[str, Rows] = field(repr=False)
    logits: NDArray[Any] = field(repr=False)
