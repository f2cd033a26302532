"""A ring whose pages are mapped twice, back to back: every window is contiguous and nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from mmap import PAGESIZE

from edgekv.kv.strategies.strategy import Move, Window, close_gaps
from edgekv.spec.geometry import RowSpec


class Mirror:
    """Each tensor is a ring of P rows; row r + P is the same memory as row r.

        row    0            head              P                          2P
               |  newer tokens |   |   oldest |  newer tokens |           |
                               new rows  past_row              new_row = past_row + S-AR

    The past of an AR step begins below row P and may continue into the second mapping, as may its new rows. Appending
    moves the head around the ring, rewinding moves it back.

    P is S-1 rows of past and `max_ar` rows for a step's new rows, rounded up so that the ring is a whole number of
    pages: the new rows of a step never overlap a held token.

    Keys as columns lie in a ring of as many bytes, where the next row is the next element. Rows are then counted up to
    D * P, once around that ring; in the values' they are taken modulo P.
    """

    def __init__(self, geometry: RowSpec, *, max_ar: int, page_bytes: int = PAGESIZE) -> None:
        whole_rows = page_bytes // gcd(page_bytes, geometry.row_bytes)
        self._rows = -(-(geometry.past_rows(1) + max_ar) // whole_rows) * whole_rows
        self._cycle = self._rows * (geometry.head_dim if geometry.key_layout == "columns" else 1)
        self._head = 0
        self._length = 0

    @property
    def rows(self) -> int:
        """P: S-1 + max_ar, rounded up to whole pages."""
        return self._rows

    @property
    def scratch_rows(self) -> int:
        return 0

    @property
    def mirrored(self) -> bool:
        return True

    @property
    def length(self) -> int:
        return self._length

    def prepare(self, ar: int, columns: int) -> Sequence[Move]:
        return ()

    def first_row(self, columns: int) -> int:
        return (self._head - columns) % self._cycle

    def window(self, ar: int, columns: int) -> Window:
        past_row = self.first_row(columns)
        return Window(
            ar=ar,
            columns=columns,
            past_row=past_row,
            new_row=past_row + columns,
            in_place=True,
            first=max(0, columns - self._length),
            stop=columns,
        )

    def commit(self, tokens: int, evicted: int) -> Sequence[Move]:
        self._head = (self._head + tokens) % self._cycle
        self._length += tokens - evicted
        return ()

    def rewind(self, tokens: int) -> Sequence[Move]:
        self._head = (self._head - tokens) % self._cycle
        self._length -= tokens
        return ()

    def drop(self, ages: Sequence[int]) -> Sequence[Move]:
        moves = close_gaps(self.first_row(self._length), ages)
        self._length -= len(ages)
        return moves

    def reset(self, length: int = 0) -> None:
        self._head = length % self._cycle
        self._length = length

    def held_rows(self) -> list[int]:
        first = self.first_row(self._length)
        return [row % self._cycle for row in range(first, first + self._length)]
