"""Move the whole past in every step: the baseline of the other strategies."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.kv.strategies.strategy import Move, Window, close_gaps
from edgekv.spec.geometry import RowSpec


class ShiftConcat:
    """The past of a step is always the last P of S rows; the newest token is in the last one.

    The graph writes its new rows to a scratch tensor. `commit` moves the past down by as many rows and appends the
    new ones, equivalent to concatenating past and new rows and dropping the oldest: P rows per step, P = S-AR of the
    graph that ran, whether they contain tokens or not.

    No graph reads row 0, but the first token of a full context is kept there.
    """

    def __init__(self, geometry: RowSpec, *, max_ar: int) -> None:
        self._context = geometry.window
        self._max_ar = max_ar
        self._columns = geometry.past_rows(1)
        self._length = 0

    @property
    def rows(self) -> int:
        """S."""
        return self._context

    @property
    def scratch_rows(self) -> int:
        return self._max_ar

    @property
    def mirrored(self) -> bool:
        return False

    @property
    def length(self) -> int:
        return self._length

    def prepare(self, ar: int, columns: int) -> Sequence[Move]:
        self._columns = columns
        return ()

    def first_row(self, columns: int) -> int:
        return self._context - columns

    def window(self, ar: int, columns: int) -> Window:
        past_row, first = self._context - columns, max(0, columns - self._length)
        return Window(ar=ar, columns=columns, past_row=past_row, new_row=0, in_place=False, first=first, stop=columns)

    def commit(self, tokens: int, evicted: int) -> Sequence[Move]:
        self._length += tokens - evicted
        if not tokens:
            return ()
        # The rows that the graph sees and the older tokens before them move together.
        first = self._context - max(self._columns, self._length)
        append = Move(0, self._context - tokens, tokens, src="scratch")
        rows = self._context - tokens - first
        return (Move(first + tokens, first, rows), append) if rows else (append,)

    def rewind(self, tokens: int) -> Sequence[Move]:
        first = self._context - self._length
        self._length -= tokens
        return (Move(first, first + tokens, self._length),) if tokens and self._length else ()

    def drop(self, ages: Sequence[int]) -> Sequence[Move]:
        moves = close_gaps(self._context - self._length, ages)
        self._length -= len(ages)
        return moves

    def reset(self, length: int = 0) -> None:
        self._length = length

    def held_rows(self) -> list[int]:
        return list(range(self._context - self._length, self._context))
