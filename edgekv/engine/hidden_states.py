"""The last hidden states of a text's newest tokens, which drafters read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_MIN_ROWS = 64


class HiddenStates:
    """The newest rows by position, as graphs give them; a row that does not follow the others drops them.

    Attributes:
        first: position of the first row.
        stop: one past the position of the last row; equal to `first` without rows.
    """

    def __init__(self, most: int) -> None:
        """Args: most: rows to hold, of which later ones drop the older half."""
        self.first = self.stop = 0
        self._most = most
        self._rows: NDArray[Any] = np.zeros((0, 0))

    @property
    def bytes_held(self) -> int:
        """Bytes allocated."""
        return self._rows.nbytes

    def write(self, position: int, rows: NDArray[Any]) -> None:
        """Append copies of rows `[T, H]`, the first one at a position: behind or within the others, or apart."""
        if not self.first <= position <= self.stop:
            self.first = position
        self.stop = position + len(rows)
        if self.stop - self.first > self._most and position > self.first:  # a text that outgrows the context
            first = min(position, max(self.first, self.stop - max(self._most // 2, 1)))
            self._rows = self._rows[first - self.first :].copy()
            self.first = first
        start, end = position - self.first, self.stop - self.first
        if end > len(self._rows) or self._rows.dtype != rows.dtype:
            grown = np.empty((max(end, min(2 * end, self._most), _MIN_ROWS), rows.shape[1]), rows.dtype)
            grown[:start] = self._rows[:start] if start else 0
            self._rows = grown
        self._rows[start:end] = rows

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """The rows of positions, `[T, H]`, valid until the next change."""
        assert self.first <= start <= stop <= self.stop, "rows that are held"
        held: NDArray[Any] = self._rows[start - self.first : stop - self.first]
        return held

    def rewind(self, position: int) -> None:
        """Drop the rows from a position on; their memory with all of them."""
        self.stop = max(self.first, min(self.stop, position))
        if self.stop == self.first:
            self.first = self.stop = position
            self._rows = np.zeros((0, 0))
