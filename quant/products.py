"""Products of matrices whose bits do not depend on the number of threads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_KERNEL = 64  # a multiple of twice the rows, columns and terms that BLAS kernels take at a time
_COLUMNS_AT_ONCE = 1024


def product(left: Floats, right: Floats) -> Floats:
    """`left @ right`, `[n, m]`, with each element summed in one order, however many threads BLAS has.

    OpenBLAS halves a long sum: with one thread at a multiple of its kernel's rows, with several anywhere. It also
    halves the rows or columns, and those that no kernel divides are summed in another order (its kernels for SSE).

    Args:
        left: `[n, k]`.
        right: `[k, m]`.
    """
    rows, columns = len(left), right.shape[1]
    if rows % _KERNEL or columns % _KERNEL:
        padded = product(_padded(left, -rows % _KERNEL, 0), _padded(right, 0, -columns % _KERNEL))
        return np.ascontiguousarray(padded[:rows, :columns])
    whole = len(right) - len(right) % _KERNEL
    found: Floats = left[:, :whole] @ right[:whole]
    if whole < len(right):
        for start in range(0, columns, _COLUMNS_AT_ONCE):
            here = slice(start, start + _COLUMNS_AT_ONCE)
            found[:, here] += left[:, whole:] @ right[whole:, here]
    return found


def _padded(matrix: Floats, rows: int, columns: int) -> Floats:
    return np.pad(matrix, ((0, rows), (0, columns)))
