"""One copy that an update strategy asks for, in rows."""

from __future__ import annotations

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
            raise ValueError(f"move: found {self}; wanted rows from 0 on, and at least one of them")

    @property
    def overlaps(self) -> bool:
        """Whether a row is both read and written."""
        return self.src == self.dst and abs(self.src_row - self.dst_row) < self.rows
