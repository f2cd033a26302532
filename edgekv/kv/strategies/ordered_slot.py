"""`slot` for rows whose order matters: states at a fixed address, and a ring of older rows."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.kv.strategies.strategy import Move, Window, moves_of


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
        return Window(
            ar=ar,
            columns=columns,
            past_row=self._ring,
            new_row=self._ring + columns,
            in_place=True,
            first=max(0, columns - self._length),
            stop=columns,
        )

    def commit(self, tokens: int, evicted: int) -> Sequence[Move]:
        if not tokens:
            return ()
        first = self._ring + self._past
        targets = [(self._head + row) % self._ring for row in range(tokens)]
        self._head = (self._head + tokens) % self._ring
        self._length += tokens - evicted
        kept = moves_of(range(first, first + tokens), targets)
        return [*kept, Move(self._ring + tokens, self._ring, self._past)]

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
