"""Which rows of a window belong to which sequences. Integers only."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Copy one physical row of every tensor to another; copies are executed in order."""

    src_row: int
    dst_row: int


class RowTable:
    """Maps (sequence, position) to a physical row, so that a fork of a sequence copies no row.

    Rows [0, columns) are in the window that a graph reads, rows [columns, columns+spill) are not. Sequences with a
    common past share its rows; a row is freed when no sequence has it. The lowest free rows are given first.

    Before a sequence runs, all its rows must be in the window, in any order, since keys carry their rotary position and
    the mask opens only the sequence's columns. While all rows fit into the window, nothing is gathered. Otherwise
    `gather` swaps in the rows that a sequence lacks.

    Attributes:
        columns: rows of the window.
        spill: further rows.
    """

    def __init__(self, columns: int, spill: int = 0) -> None:
        """Start without sequences.

        Args:
            columns: rows of the window.
            spill: further rows; one of them is a temporary row for swaps.
        """
        self.columns = columns
        self.spill = spill
        self._rows: dict[Hashable, list[int]] = {}
        self._free_columns = list(range(columns))  # both are heaps
        self._free_spill = list(range(columns, columns + spill))

    def __contains__(self, sequence: Hashable) -> bool:
        return sequence in self._rows

    @property
    def free(self) -> int:
        """Rows of the window that no sequence has."""
        return len(self._free_columns)

    @property
    def used(self) -> int:
        """Rows that sequences have."""
        return self.columns + self.spill - len(self._free_columns) - len(self._free_spill)

    @property
    def sequences(self) -> list[Hashable]:
        """The sequences, in the order in which they joined."""
        return list(self._rows)

    def of(self, sequence: Hashable) -> Sequence[int]:
        """The rows of a sequence, of its oldest token first."""
        return self._rows[sequence]

    def join(self, sequence: Hashable, tokens: int) -> Sequence[int]:
        """Give rows of the window to a new sequence.

        Raises:
            ValueError: it has rows already, or there are too few.
        """
        if sequence in self._rows or tokens > self.free:
            raise ValueError(f"join: got {tokens} tokens; expected a new sequence of at most {self.free}")
        self._rows[sequence] = [heappop(self._free_columns) for _ in range(tokens)]
        return self._rows[sequence]

    def adopt(self, sequence: Hashable, columns: Sequence[int]) -> None:
        """Let the first sequence have these rows of the window, which hold its tokens already.

        Raises:
            ValueError: there are other sequences.
        """
        if self._rows:
            raise ValueError(f"adopt: got {len(self._rows)} sequences; expected none")
        self._rows[sequence] = [*columns]
        self._free_columns = sorted({*self._free_columns} - {*columns})

    def append(self, sequence: Hashable) -> int:
        """Give a sequence a row for one more token, in the window if one is free.

        Raises:
            ValueError: there is none, or the sequence fills the window.
        """
        rows, free = self._rows[sequence], self._free_columns or self._free_spill
        if not free or len(rows) >= self.columns:
            raise ValueError(f"append: got {len(rows)} rows and {len(free)} free; expected below {self.columns}, and 1")
        rows.append(heappop(free))
        return rows[-1]

    def fork(self, parents: Mapping[Hashable, Hashable]) -> None:
        """Let sequences go on from others, all at once: each has the rows of its parent; what it had is left.

        Raises:
            ValueError: a parent that has no rows.
        """
        if unknown := [parent for parent in parents.values() if parent not in self._rows]:
            raise ValueError(f"parents: got {unknown[0]!r}; expected one of {self.sequences}")
        before = self._rows
        self._rows = before | {sequence: [*before[parent]] for sequence, parent in parents.items()}
        gone = {*before} - {*parents.values()}
        self._free(chain.from_iterable(before[sequence] for sequence in gone if sequence in parents))

    def leave(self, sequence: Hashable) -> None:
        """Free the rows of a sequence that no other has, if it has any."""
        self._free(self._rows.pop(sequence, ()))

    def gather(self, sequence: Hashable) -> Sequence[RowCopy]:
        """Bring the rows of a sequence into the window; return the necessary copies, in order."""
        missing = [row for row in self._rows[sequence] if row >= self.columns] if self.spill else ()
        if not missing:
            return ()
        copies: list[RowCopy] = []
        moved: dict[int, int] = {}
        victims = self._victims(sequence)
        for row in missing:
            if self._free_columns:
                column = heappop(self._free_columns)
            else:
                column = next(victims)
                moved[column] = heappop(self._free_spill)
                copies.append(RowCopy(column, moved[column]))
            moved[row] = column
            copies.append(RowCopy(row, column))
            heappush(self._free_spill, row)
        self._rows = {name: [moved.get(row, row) for row in rows] for name, rows in self._rows.items()}
        return copies

    def _free(self, rows: Iterator[int] | Sequence[int]) -> None:
        for row in {*rows}.difference(*self._rows.values()):
            heappush(self._free_columns if row < self.columns else self._free_spill, row)

    def _victims(self, sequence: Hashable) -> Iterator[int]:
        """Rows of the window that a sequence does not need; first those that are needed last when all run in turn."""
        names = self.sequences
        at = names.index(sequence)
        turns: dict[int, int] = {}
        for turn in range(len(names) - 1, 0, -1):
            turns.update(dict.fromkeys(self._rows[names[(at + turn) % len(names)]], turn))
        needed = set(self._rows[sequence])
        others = [row for row in turns if row < self.columns and row not in needed]
        return iter(sorted(others, key=lambda row: (-turns[row], row)))
