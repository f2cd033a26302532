"""What a cache asks of layers that share a geometry, whatever they keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from edgekv.kv.arena import Arena, Rows
from edgekv.kv.strategies.strategy import Window
from edgekv.spec.geometry import LayerSpec


class HeldRows(Protocol):
    """Where the rows of tokens are."""

    def held_rows(self) -> list[int]:
        """The arena rows of the tokens held, oldest token first."""


class CacheGroup(Protocol):
    """Equal layers: with a row per token (`RowGroup`), or with a state (`StateGroup`, `TailGroup`, `CheckpointGroup`).

    Arguments are not checked: `KVCache` has checked them. Tokens are counted from the start of the text.

    Attributes:
        arenas: memory of all tensors.
        reallocations: number of reallocations, which change the arenas' addresses.
    """

    arenas: tuple[Arena, ...]
    reallocations: int

    @property
    def geometry(self) -> LayerSpec:
        """The sizes, and the numbers of the layers."""

    @property
    def strategy(self) -> HeldRows:
        """Where rows are."""

    @property
    def length(self) -> int:
        """Tokens whose rows are held."""

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in use."""

    def window(self, ar: int, context: int, block: int = 0) -> Window:
        """Prepare a step of the AR-`ar` graph for a context of S; return what it reads and writes.

        Args:
            ar: tokens per inference.
            context: S of the graph.
            block: past rows are read up to the last one in use, in a multiple of this number; 0 to read all.
        """

    def compact(self, first: int, rows: Sequence[int]) -> None:
        """Copy these new rows of the open step, ascending, to its new rows `first`, `first` + 1, ..."""

    def commit(self, tokens: int) -> None:
        """Keep the first new rows of the open step; what no later step reads may be dropped."""

    def can_rewind(self, tokens: int, seen: int) -> bool:
        """Whether the group can be as it was `tokens` tokens ago, of the `seen` ones of the text."""

    def rewind(self, tokens: int) -> None:
        """Drop the newest tokens, at most `length`."""

    def reset(self, tokens: int = 0) -> None:
        """Hold nothing but what the next step reads of `tokens` tokens, whose rows the caller writes."""

    def snapshot(self) -> Mapping[str, Rows]:
        """A copy of all rows that later steps read, `[tokens, D]`, oldest first, by the name of the graph input."""

    def check(self, rows: Mapping[str, Rows], tokens: int | None) -> None:
        """Reject rows that `restore` cannot store, such as those of another geometry.

        Args:
            rows: as `snapshot` returns them.
            tokens: that they are the rows of; None if they may be fewer than those held.

        Raises:
            StateError: naming the tensor.
        """

    def restore(self, rows: Mapping[str, Rows]) -> None:
        """Replace the content by what `snapshot` returned."""
