"""Products of matrices whose bits do not depend on the number of threads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_TERMS_OF_KERNELS = 64  # a multiple of twice the rows of BLAS kernels
_COLUMNS_AT_ONCE = 1024


def product(left: Floats, right: Floats) -> Floats:
    """`left @ right`, `[n, m]`, with each element summed in one order, however many threads BLAS has.

    OpenBLAS halves a long sum: with one thread at a multiple of its kernel's rows, with several anywhere.

    Args:
        left: `[n, k]`.
        right: `[k, m]`.
    """
    whole = len(right) - len(right) % _TERMS_OF_KERNELS
    found: Floats = left[:, :whole] @ right[:whole]
    if whole < len(right):
        for start in range(0, right.shape[1], _COLUMNS_AT_ONCE):
            here = slice(start, start + _COLUMNS_AT_ONCE)
            found[:, here] += left[:, whole:] @ right[whole:, here]
    return found
