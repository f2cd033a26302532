"""Keep every tensor at a fixed address and write each new row to a free slot: the smart mask."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from edgekv.kv.geometry import Geometry
from edgekv.kv.move import Move, Place
from edgekv.kv.window import Window


class Slot:
    """The past of an AR step is rows [0, S-AR) of each tensor, always; the mask opens those that hold a token.

    The graph writes its new rows to a scratch tensor, and `commit` copies them to free rows: with one strided write
    for all tensors as long as the free rows lie together. Keys carry their rotary position, so the order of the past
    does not matter. The tokens held always fill rows [0, length).

    When the oldest tokens leave, new ones take their rows, as in a ring. Some of the S-AR newest tokens may then lie
    at or behind row S-AR, where a graph with AR > 1 does not look; `prepare` swaps them with the oldest (at most
    AR-1 rows, by way of the scratch). Rewinding past such an exchange moves at most as many rows as
    tokens are dropped. An AR-1 graph never needs an exchange.

    Each tensor has S rows: no graph reads the last one, but the last token of a full context is kept there.
    """

    def __init__(self, geometry: Geometry, *, max_ar: int) -> None:
        self._context = geometry.context
        self._max_ar = max_ar
        self._order: deque[int] = deque()  # rows of the tokens held, oldest token first

    @property
    def rows(self) -> int:
        """S."""
        return self._context

    @property
    def scratch_rows(self) -> int:
        return self._max_ar

    @property
    def length(self) -> int:
        return len(self._order)

    def prepare(self, ar: int) -> Sequence[Move]:
        visible = self._context - ar
        hidden = len(self._order) - visible
        if ar == 1 or hidden <= 0:
            return ()
        order = self._order
        leaving = sorted((row, i) for i, row in enumerate(islice(order, hidden)) if row < visible)
        if not leaving:
            return ()
        entering = sorted((row, i) for i, row in enumerate(order) if row >= visible and i >= hidden)
        for (old_row, old), (new_row, new) in zip(leaving, entering, strict=True):
            order[old], order[new] = new_row, old_row
        old_rows = [row for row, _ in leaving]
        new_rows = [row for row, _ in entering]
        aside = range(len(old_rows))
        return (
            *_moves(old_rows, aside, dst="scratch"),
            *_moves(new_rows, old_rows),
            *_moves(aside, new_rows, src="scratch"),
        )

    def window(self, ar: int) -> Window:
        stop = min(len(self._order), self._context - ar)
        return Window(ar=ar, past_row=0, new_row=0, in_place=False, first=0, stop=stop)

    def commit(self, tokens: int, evicted: int) -> Sequence[Move]:
        order = self._order
        held = len(order)
        landing = [order.popleft() for _ in range(evicted)]
        landing.sort()  # rows that an exchange has scattered grow together again: fewer moves from now on
        landing.extend(range(held, held + tokens - evicted))
        order.extend(landing)
        return _moves(range(tokens), landing, src="scratch")

    def rewind(self, tokens: int) -> Sequence[Move]:
        order = self._order
        freed = [order.pop() for _ in range(tokens)]
        length = len(order)
        holes = sorted(row for row in freed if row < length)
        if not holes:
            return ()
        strays = sorted((row, i) for i, row in enumerate(order) if row >= length)
        for (_, i), hole in zip(strays, holes, strict=True):
            order[i] = hole
        return _moves([row for row, _ in strays], holes)

    def reset(self) -> None:
        self._order.clear()

    def held_rows(self) -> list[int]:
        return list(self._order)


def _moves(
    src_rows: Sequence[int], dst_rows: Sequence[int], *, src: Place = "arena", dst: Place = "arena"
) -> list[Move]:
    """Copy row by row, in as few moves as the runs of neighbouring rows allow."""
    moves = []
    start = 0
    for i in range(1, len(src_rows) + 1):
        if (
            i == len(src_rows)
            or src_rows[i] - src_rows[start] != i - start
            or dst_rows[i] - dst_rows[start] != i - start
        ):
            moves.append(Move(src_rows[start], dst_rows[start], i - start, src, dst))
            start = i
    return moves
