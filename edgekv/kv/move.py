"""One copy that an update strategy asks for, in rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Place = Literal["arena", "scratch"]


@dataclass(frozen=True, slots=True)
class Move:
    """Copy a range of rows in every tensor at once; source and destination may overlap.

    Attributes:
        src_row: first row read, of a tensor in `src`.
        dst_row: first row written, of the same tensor in `dst`.
        rows: how many rows; at least 1.
        src: the cache tensors (`arena`) or the small tensors where new rows land (`scratch`).
        dst: likewise.
    """

    src_row: int
    dst_row: int
    rows: int
    src: Place = "arena"
    dst: Place = "arena"

    def __post_init__(self) -> None:
        if self.src_row < 0 or self.dst_row < 0 or self.rows < 1:
            raise ValueError(f"move: got {self}; expected rows from 0 on, and at least one of them")

    @property
    def overlaps(self) -> bool:
        """Whether a row is both read and written."""
        return self.src == self.dst and abs(self.src_row - self.dst_row) < self.rows


def moves_of(
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


def close_gaps(first_row: int, ages: Sequence[int]) -> list[Move]:
    """Drop tokens that lie in neighbouring rows: those older than a gap move up to close it, the newest first.

    Args:
        first_row: the row of the oldest token, whose age is 0.
        ages: the tokens to drop, ascending.
    """
    moves = []
    for i in reversed(range(len(ages))):
        start = ages[i - 1] + 1 if i else 0
        if rows := ages[i] - start:
            moves.append(Move(first_row + start, first_row + start + len(ages) - i, rows))
    return moves
