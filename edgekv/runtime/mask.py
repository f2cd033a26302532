"""The attention mask of the layers that attend alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.kv import Window
from quant import Encoding


class AttentionMask:
    """Rows of a graph's mask, `[AR, P + AR]`: columns of the past, then those of the new tokens.

    A column that a row sees holds 0.0; one that it does not, as rows without a token, the least that the encoding can.
    """

    def __init__(self, rows: NDArray[Any], encoding: Encoding) -> None:
        """Write into these rows from now on."""
        self._rows = rows
        self._ar = len(rows)
        self._past = rows.shape[1] - self._ar
        self._open, self._closed = encoding.zero_point, encoding.limits[0]
        self._causal = np.where(np.tri(self._ar, dtype=bool), self._open, self._closed).astype(rows.dtype)
        self._filled = 0

    def write(self, tokens: int, window: Window, columns: Sequence[int] = ()) -> None:
        """Let the first `tokens` rows see what the window says.

        Args:
            tokens: 1 to AR.
            window: of the layers.
            columns: of the past, to be seen beside those that the window names.
        """
        rows = self._rows
        rows[:tokens, : self._past] = self._closed
        rows[:tokens, window.first : window.stop] = self._open
        if columns:
            rows[:tokens, columns] = self._open
        # A column that has left a row's window has left those of all later rows.
        for gone, column in enumerate(window.leaving, self._ar - len(window.leaving)):
            rows[gone:, column] = self._closed
        if tokens != self._filled:
            rows[tokens:] = self._closed
            rows[:tokens, self._past :] = self._causal[:tokens]
            self._filled = tokens
