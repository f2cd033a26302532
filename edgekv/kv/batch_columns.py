"""Which columns of a window belong to which sequence, when one pass advances several. Integers only."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heapify, heappop


class BatchColumns:
    """Gives the columns of a window to sequences; each column has one owner. The lowest free ones are given first."""

    def __init__(self, columns: int) -> None:
        """All of `columns` columns are free."""
        self._free = list(range(columns))
        self._owned: dict[Hashable, list[int]] = {}

    def __contains__(self, sequence: Hashable) -> bool:
        return sequence in self._owned

    @property
    def free(self) -> int:
        """Columns without an owner."""
        return len(self._free)

    @property
    def sequences(self) -> list[Hashable]:
        """The owners, in the order in which they joined."""
        return list(self._owned)

    def of(self, sequence: Hashable) -> Sequence[int]:
        """The columns of a sequence, of its oldest token first."""
        return self._owned[sequence]

    def join(self, sequence: Hashable, tokens: int) -> Sequence[int]:
        """Give columns to a new sequence.

        Raises:
            ValueError: it has columns already, or there are too few.
        """
        if sequence in self._owned or tokens > self.free:
            raise ValueError(f"join: got {tokens} tokens; expected a new sequence of at most {self.free}")
        self._owned[sequence] = [heappop(self._free) for _ in range(tokens)]
        return self._owned[sequence]

    def append(self, sequence: Hashable) -> int:
        """Give a sequence a column for one more token.

        Raises:
            ValueError: none is free.
        """
        if not self._free:
            raise ValueError("append: got no free column; expected one")
        self._owned[sequence].append(heappop(self._free))
        return self._owned[sequence][-1]

    def leave(self, sequence: Hashable) -> None:
        """Free the columns of a sequence, if it has any."""
        self._free += self._owned.pop(sequence, ())
        heapify(self._free)
