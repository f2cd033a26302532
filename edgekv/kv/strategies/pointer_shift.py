"""Keep the past in place and move the pointers: the update of Qualcomm's HTP note."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil

from edgekv.errors import UsageError
from edgekv.kv.strategies.strategy import Move, Window, close_gaps
from edgekv.spec.geometry import RowSpec

DEFAULT_RESERVE = Fraction(2)


def parse_reserve(reserve: Fraction | float | str) -> Fraction:
    """The reserve as an exact ratio; a float means the decimal that it prints as (1.1 is 11/10).

    Raises:
        UsageError: not a number above 1 and at most 2.
    """
    try:
        ratio = reserve if isinstance(reserve, Fraction) else Fraction(str(reserve))
    except (ValueError, ZeroDivisionError):
        ratio = Fraction(0)
    if not 1 < ratio <= 2:
        raise UsageError("reserve", got=reserve, expected="a number above 1 and at most 2", fix="Use 2.0 or 1.5.")
    return ratio


class PointerShift:
    """Each tensor is a strip on which the window of the past slides towards higher rows.

        row    0                     S-1                              ceil(reserve*(S-1))+max_ar
               |  empty  | held tokens |  new rows of this step |  free  |
                         head-length   head                     head+AR

    The past of an AR step is `[head-(S-AR), head)`, and the graph writes its new rows to `[head, head+AR)` of the
    same tensor, so `commit` only adds to `head`. When the new rows would not fit, the rows held (at most S-1) are
    slid down so that `head` is S-1 again: with reserve 2 once per S-1 tokens or more rarely, with reserve r once
    per (r-1)(S-1).

    The reserve counts rows for S-1 tokens of past and the tokens until a slide. The `max_ar` rows beyond it are the
    overhang for a step's new rows, of which the last ones may hold no token: without them a partly filled step
    would force a slide before the reserve is used up.

    A rewind after a slide can leave `head` below S-AR; the next step then first slides the rows up.
    """

    def __init__(self, geometry: RowSpec, reserve: Fraction | float = DEFAULT_RESERVE, *, max_ar: int) -> None:
        self._home = geometry.past_rows(1)
        self._rows = ceil(parse_reserve(reserve) * self._home) + max_ar
        self._head = self._home
        self._length = 0

    @property
    def rows(self) -> int:
        """ceil(reserve*(S-1)) + max_ar."""
        return self._rows

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
        if columns <= self._head <= self._rows - ar:
            return ()
        # The head of an empty cache is at its start, where every step fits: here there is a row to move.
        slide = Move(self._head - self._length, self._home - self._length, self._length)
        self._head = self._home
        return (slide,)

    def first_row(self, columns: int) -> int:
        return self._head - columns

    def window(self, ar: int, columns: int) -> Window:
        return Window(
            ar=ar,
            columns=columns,
            past_row=self.first_row(columns),
            new_row=self._head,
            in_place=True,
            first=max(0, columns - self._length),
            stop=columns,
        )

    def commit(self, tokens: int, evicted: int) -> Sequence[Move]:
        self._head += tokens
        self._length += tokens - evicted
        return ()

    def rewind(self, tokens: int) -> Sequence[Move]:
        self._length -= tokens
        self._head = self._head - tokens if self._length else self._home
        return ()

    def drop(self, ages: Sequence[int]) -> Sequence[Move]:
        moves = close_gaps(self._head - self._length, ages)
        self._length -= len(ages)
        self._head = self._head if self._length else self._home
        return moves

    def reset(self, length: int = 0) -> None:
        self._head = max(self._home, length)
        self._length = length

    def held_rows(self) -> list[int]:
        return list(range(self._head - self._length, self._head))
