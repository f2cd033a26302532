"""Keep every tensor at a fixed address and write each new row to a free slot."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from edgekv.kv.strategies.strategy import Move, Window, moves_of
from edgekv.spec.geometry import RowSpec


class Slot:
    """The past of a step is always the first P rows of each tensor; the mask opens the rows in use.

    The graph writes its new rows to a scratch tensor, and `commit` copies them to free rows: with one strided write
    for all tensors as long as the free rows are contiguous. Keys carry their rotary position, so the order of the past
    does not matter. The tokens held always fill rows [0, length), so a graph of a smaller context sees them all as
    long as it has a column for each, and moving to the next larger one copies nothing.

    When the oldest tokens are evicted, new ones take their rows, as in a ring. Some of the P newest tokens may then be
    at row P = S-AR or above, which a graph with AR > 1 does not read; `prepare` swaps them with the oldest (at most
    AR-1 rows, through the scratch). Rewinding past such a swap moves at most one row per dropped token. An AR-1 graph
    never needs a swap.

    Each tensor has S rows: no graph reads the last one, but the last token of a full context is kept there.
    """

    def __init__(self, geometry: RowSpec, *, max_ar: int) -> None:
        self._context = geometry.window
        self._max_ar = max_ar
        self._order: deque[int] = deque()  # rows of the tokens held, oldest token first
        # The inverse, so that no step scans the whole order: a token's age is its serial - the oldest serial.
        self._serials = [0] * geometry.window
        self._oldest = 0

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
        return len(self._order)

    def prepare(self, ar: int, columns: int) -> Sequence[Move]:
        order, serials = self._order, self._serials
        hidden = len(order) - columns
        if hidden <= 0:
            return ()
        leaving = sorted((row, age) for age, row in enumerate(islice(order, hidden)) if row < columns)
        if not leaving:
            return ()
        oldest = self._oldest
        entering = [(row, age) for row in range(columns, len(order)) if (age := serials[row] - oldest) >= hidden]
        for (old_row, old), (new_row, new) in zip(leaving, entering, strict=True):
            order[old], order[new] = new_row, old_row
            serials[old_row], serials[new_row] = oldest + new, oldest + old
        old_rows = [row for row, _ in leaving]
        new_rows = [row for row, _ in entering]
        parked = range(len(old_rows))
        return (
            *moves_of(old_rows, parked, dst="scratch"),
            *moves_of(new_rows, old_rows),
            *moves_of(parked, new_rows, src="scratch"),
        )

    def first_row(self, columns: int) -> int:
        return 0

    def window(self, ar: int, columns: int) -> Window:
        stop = min(len(self._order), columns)
        return Window(ar=ar, columns=columns, past_row=0, new_row=0, in_place=False, first=0, stop=stop)

    def commit(self, tokens: int, evicted: int) -> Sequence[Move]:
        order, serials = self._order, self._serials
        held = len(order)
        if not evicted and tokens:
            serials[held : held + tokens] = range(self._oldest + held, self._oldest + held + tokens)
            order.extend(range(held, held + tokens))
            return (Move(0, held, tokens, src="scratch"),)
        landing = [order.popleft() for _ in range(evicted)]
        landing.sort()  # rows scattered by a swap become contiguous again: fewer moves later
        landing.extend(range(held, held + tokens - evicted))
        for serial, row in enumerate(landing, self._oldest + held):
            serials[row] = serial
        self._oldest += evicted
        order.extend(landing)
        return moves_of(range(tokens), landing, src="scratch")

    def rewind(self, tokens: int) -> Sequence[Move]:
        order = self._order
        held = len(order)
        return self._fill(held, [order.pop() for _ in range(tokens)])

    def drop(self, ages: Sequence[int]) -> Sequence[Move]:
        order = list(self._order)
        gone = set(ages)
        freed = [order[age] for age in ages]
        self._adopt(row for age, row in enumerate(order) if age not in gone)
        return self._fill(len(order), freed)

    def reset(self, length: int = 0) -> None:
        self._adopt(range(length))

    def held_rows(self) -> list[int]:
        return list(self._order)

    def _adopt(self, rows: Iterable[int]) -> None:
        self._order = deque(rows)
        self._oldest = 0
        for serial, row in enumerate(self._order):
            self._serials[row] = serial

    def _fill(self, held: int, freed: Sequence[int]) -> Sequence[Move]:
        """Move the tokens at row `length` and above to freed rows below; `held` is the former length."""
        length = len(self._order)
        holes = sorted(row for row in freed if row < length)
        if not holes:
            return ()
        gone = set(freed)
        strays = [row for row in range(length, held) if row not in gone]
        for stray, hole in zip(strays, holes, strict=True):
            serial = self._serials[stray]
            self._order[serial - self._oldest] = hole
            self._serials[hole] = serial
        return moves_of(strays, holes)
