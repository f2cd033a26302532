"""Logits of a step, and what may change them before a token is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


class LogitsProcessor(Protocol):
    """Changes the logits of one step. Any function of this signature is one."""

    def __call__(self, prompt: Sequence[int], generated: Sequence[int], logits: Logits) -> NDArray[Any]:
        """The logits to choose from.

        Args:
            prompt: token ids of the prompt.
            generated: token ids generated so far, oldest first.
            logits: float logits `[V]` of the step, a copy that may be changed in place.

        Returns:
            Logits `[V]`; the same array or another. -inf forbids a token.
        """
