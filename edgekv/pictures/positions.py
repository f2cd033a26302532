"""Positions of tokens where rows of pictures have a row and a column (mrope, arXiv 2409.12191)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]
FIRST_ID = 1 << 62
"""Ids of rows have this bit and 62 bits of a hash: no vocabulary reaches them, and no two pictures share one."""


def row_places(rows: int, columns: int) -> Places:
    """Of each row of a picture its row and column there, and how far the text moves on behind it, `[rows, 3]`.

    The position of the text behind a picture is that of the picture's beginning plus the rows of its longer edge.
    """
    down, across = np.divmod(np.arange(rows * columns), columns)
    moves = np.zeros(rows * columns, np.int64)
    moves[-1] = max(rows, columns)
    return np.stack([down, across, moves], axis=1)


def axis_positions(places: Places) -> Places:
    """Position of each token in the text, and along rows and columns, `[T, 3]`, from 0 on.

    Args:
        places: of each token, as `row_places`; one of a text has no row and no column, and moves on by 1.
    """
    moves = places[:, 2]
    starts = np.cumsum(moves) - moves
    return np.stack([starts, starts + places[:, 0], starts + places[:, 1]], axis=1)


class PositionOffsets:
    """How far the next position of a text is from its number of tokens: pictures have fewer positions than rows."""

    def __init__(self, place: Callable[[int], Sequence[int]]) -> None:
        """Args: place: of the id of a row, see `row_places`."""
        self._place = place
        self._seen = 0
        self._rows: list[int] = []  # where rows of pictures stand
        self._offsets: list[int] = []  # behind each

    def cut(self, tokens: int) -> None:
        """Let the text be one that has the same first tokens."""
        if tokens < self._seen:
            self._seen, kept = tokens, bisect_left(self._rows, tokens)
            del self._rows[kept:], self._offsets[kept:]

    def of(self, tokens: Sequence[int]) -> int:
        """The offset behind these tokens, 0 or below; they go on from those of the call before, or from a `cut`."""
        self.cut(len(tokens))
        for at in range(self._seen, len(tokens)):
            if tokens[at] >= FIRST_ID:
                self._rows.append(at)
                self._offsets.append((self._offsets or [0])[-1] + self._place(tokens[at])[2] - 1)
        self._seen = len(tokens)
        return (self._offsets or [0])[-1]
