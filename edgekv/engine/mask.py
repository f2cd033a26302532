"""The attention mask of the layers that attend alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.kv import Window

ATTEND = 65535


class AttentionMask:
    """Rows of a graph's mask, `[AR, P + AR]`: columns of the past, then those of the new tokens.

    Rows without a token, and columns that no row may see, are 0.
    """

    def __init__(self, rows: NDArray[Any]) -> None:
        """Write into these rows from now on."""
        self._rows = rows
        self._ar = len(rows)
        self._past = rows.shape[1] - self._ar
        self._causal = np.tril(np.full((self._ar, self._ar), ATTEND, rows.dtype))
        self._filled = 0

    def write(self, tokens: int, window: Window, columns: Sequence[int] = ()) -> None:
        """Let the first `tokens` rows see what the window says.

        Args:
            tokens: 1 to AR.
            window: of the layers.
            columns: of the past, to be seen beside those that the window names.
        """
        rows = self._rows
        rows[:tokens, : self._past] = 0
        rows[:tokens, window.first : window.stop] = ATTEND
        if columns:
            rows[:tokens, columns] = ATTEND
        # A column that has left a row's window has left those of all later rows.
        for gone, column in enumerate(window.leaving, self._ar - len(window.leaving)):
            rows[gone:, column] = 0
        if tokens != self._filled:
            rows[tokens:] = 0
            rows[:tokens, self._past :] = self._causal[:tokens]
            self._filled = tokens
