"""The attention mask of layers with one window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.kv import Window
from quant import Encoding


class AttentionMask:
    """A graph's mask, `[AR, P + AR]`: a row for each new token, columns for the past rows and then the new tokens.

    An element is 0.0 where the row attends to the column, and the encoding's minimum where it does not. Rows
    without a token attend to nothing.
    """

    def __init__(self, rows: NDArray[Any], encoding: Encoding) -> None:
        """Use `rows` as the mask's memory."""
        self._rows = rows
        self._ar = len(rows)
        self._past = rows.shape[1] - self._ar
        self._open, self._closed = encoding.zero_point, encoding.limits[0]
        self._causal = np.where(np.tri(self._ar, dtype=bool), self._open, self._closed).astype(rows.dtype)
        self._filled = 0

    def write(self, tokens: int, window: Window, columns: Sequence[int] = ()) -> None:
        """Write the mask of a step of `tokens` tokens.

        Args:
            tokens: 1 to AR.
            window: of the layers.
            columns: past columns to attend to besides those of the window.
        """
        rows = self._rows
        rows[:tokens, : self._past] = self._closed
        rows[:tokens, window.first : window.stop] = self._open
        if columns:
            rows[:tokens, columns] = self._open
        # A column outside the window of one row is also outside the window of every later row.
        for gone, column in enumerate(window.leaving, self._ar - len(window.leaving)):
            rows[gone:, column] = self._closed
        if tokens != self._filled:
            rows[tokens:] = self._closed
            rows[:tokens, self._past :] = self._causal[:tokens]
            self._filled = tokens
