"""Maps tokens of beams to physical rows. Integers only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Copy one physical row of every tensor to another; copies are executed in order."""

    src_row: int
    dst_row: int


class BeamTable:
    """Maps (beam, position) to a physical row, so that reordering beams copies no row.

    Positions count from the end of the prompt, whose rows all beams share and which is not in the table. Rows [0,
    columns) are in the window that a graph reads, rows [columns, columns+spill) are not. Beams with a common past share
    its rows; a row is freed when no beam refers to it.

    Before a beam runs, all its rows must be in the window, in any order, since keys carry their rotary position and the
    mask opens only the beam's columns. While the rows of all beams fit into the window, nothing is gathered. Otherwise
    `gather` swaps in the rows that a beam lacks.
    """

    def __init__(self, beams: int, *, columns: int, kept: int) -> None:
        """Start with beams that contain only the prompt.

        Args:
            beams: number of beams.
            columns: rows of the window that the prompt does not use.
            kept: maximum rows of one beam; at most `columns`.
        """
        if beams < 1 or not 0 <= kept <= columns:
            raise ValueError(f"beam table: got {beams} beams of {kept} rows; expected beams of 0 to {columns} rows")
        # One row more than can be in use, as a temporary row for swaps.
        self.spill = beams * kept + 1 - columns if beams * kept > columns else 0
        self.columns = columns
        self._kept = kept
        self._rows: list[list[int]] = [[] for _ in range(beams)]
        self._free_columns = list(range(columns))[::-1]
        self._free_spill = list(range(columns, columns + self.spill))[::-1]

    @property
    def beams(self) -> int:
        """Number of beams."""
        return len(self._rows)

    @property
    def used(self) -> int:
        """Number of rows that beams refer to."""
        return self.columns + self.spill - len(self._free_columns) - len(self._free_spill)

    def rows(self, beam: int) -> Sequence[int]:
        """The physical rows of a beam, oldest token first."""
        return tuple(self._rows[beam])

    def append(self, beam: int) -> int:
        """Give a beam a row for one more token, in the window if one is free.

        Raises:
            ValueError: the beam has its maximum number of rows.
        """
        rows = self._rows[beam]
        if len(rows) >= self._kept:
            raise ValueError(f"append: got {len(rows)} rows of beam {beam}; expected at most {self._kept - 1} before")
        row = (self._free_columns or self._free_spill).pop()
        rows.append(row)
        return row

    def reorder(self, parents: Sequence[int]) -> None:
        """Let beam i continue beam `parents[i]`; rows of discontinued beams are freed.

        Raises:
            ValueError: not one parent for each beam.
        """
        if len(parents) != self.beams or not all(0 <= parent < self.beams for parent in parents):
            raise ValueError(f"parents: got {list(parents)}; expected {self.beams} numbers of beams")
        before = self._rows
        self._rows = [list(before[parent]) for parent in parents]
        dropped = [rows for beam, rows in enumerate(before) if beam not in set(parents)]
        for row in set().union(*dropped).difference(*self._rows) if dropped else ():
            (self._free_columns if row < self.columns else self._free_spill).append(row)

    def gather(self, beam: int) -> Sequence[RowCopy]:
        """Bring the rows of a beam into the window; return the necessary copies, in order."""
        missing = [row for row in self._rows[beam] if row >= self.columns]
        if not missing:
            return ()
        copies: list[RowCopy] = []
        moved: dict[int, int] = {}
        victims = self._victims(beam)
        for row in missing:
            if self._free_columns:
                column = self._free_columns.pop()
            else:
                column = next(victims)
                moved[column] = self._free_spill.pop()
                copies.append(RowCopy(column, moved[column]))
            moved[row] = column
            copies.append(RowCopy(row, column))
            self._free_spill.append(row)
        self._rows = [[moved.get(row, row) for row in rows] for rows in self._rows]
        return copies

    def _victims(self, beam: int) -> Iterator[int]:
        """Rows of the window that the beam does not need; first those that are needed last when beams run in turn."""
        turns: dict[int, int] = {}
        for turn in range(self.beams - 1, 0, -1):
            turns.update(dict.fromkeys(self._rows[(beam + turn) % self.beams], turn))
        needed = set(self._rows[beam])
        others = [row for row in turns if row < self.columns and row not in needed]
        return iter(sorted(others, key=lambda row: (-turns[row], row)))
