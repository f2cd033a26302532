"""`slot` for rows whose order matters: states at a fixed address, and a ring of older rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

from edgekv.kv.strategies.strategy import Move, Window, moves_of


@cache
def _window(past_row: int, ar: int, columns: int, first: int) -> Window:
    return Window(ar, columns, past_row, past_row + columns, in_place=True, first=first, stop=columns)


@lru_cache(1024)
def _appending(ring: int, past: int, head: int, tokens: int) -> tuple[Move, ...]:
    """New rows to the ring, then the newest to the place of the past."""
    new, before_end = ring + past, min(tokens, ring - head)
    moves = [Move(new, head, before_end), Move(ring + tokens, ring, past)]
    if before_end < tokens:
        moves.insert(1, Move(new + before_end, 0, tokens - before_end))
    return tuple(moves)


class OrderedSlot:
    """The past of a step is always the same P rows, oldest first, and its new rows directly follow them.

        row      0                  R             R+P
                 |  ring of R rows  |  past       |  new rows  |

    `commit` writes the new rows to the ring, and moves the newest P of past and new rows to the place of the past. A
    rewind only moves the ring's head; the next step takes its past from the ring.
    """

    def __init__(self, ring_rows: int, past_rows: int, *, max_ar: int) -> None:
        """A ring for at least `past_rows` and `max_ar` rows."""
        self._ring = ring_rows
        self._past = past_rows
        self._max_ar = max_ar
        self._head = 0
        self._length = 0
        self._is_stale = False

    @property
    def rows(self) -> int:
        """R + P + max_ar."""
        return self._ring + self._past + self._max_ar

    @property
    def scratch_rows(self) -> int:
        return 0

    @property
    def mirrored(self) -> bool:
        return False

    @property
    def length(self) -> int:
        return self._length

    def prepare(self, ar: int, columns: int) -> Sequence[Move]:
        if not self._is_stale:
            return ()
        self._is_stale = False
        newest = self.held_rows()[-columns:]
        return moves_of(newest, range(self._ring + columns - len(newest), self._ring + columns))

    def window(self, ar: int, columns: int) -> Window:
        return _window(self._ring, ar, columns, max(0, columns - self._length))

    def commit(self, tokens: int, evicted: int) -> Sequence[Move]:
        if not tokens:
            return ()
        head, self._head = self._head, (self._head + tokens) % self._ring
        self._length += tokens - evicted
        return _appending(self._ring, self._past, head, tokens)

    def rewind(self, tokens: int) -> Sequence[Move]:
        self._head = (self._head - tokens) % self._ring
        self._length -= tokens
        self._is_stale = True
        return ()

    def reset(self, length: int = 0) -> None:
        self._head = length % self._ring
        self._length = length
        self._is_stale = True

    def held_rows(self) -> list[int]:
        first = self._head - self._length
        return [row % self._ring for row in range(first, first + self._length)]
