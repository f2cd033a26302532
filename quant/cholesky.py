"""Cholesky's factor by blocks: numpy's own routines are several times slower on large matrices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_BLOCK = 256


def cholesky(matrix: Floats) -> Floats:
    """The lower triangular L with L L^T = `matrix`, which is overwritten.

    Args:
        matrix: symmetric and positive definite.

    Raises:
        numpy.linalg.LinAlgError: it is not positive definite.
    """
    size = len(matrix)
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        corner = np.linalg.cholesky(matrix[start:stop, start:stop])
        below = matrix[stop:, start:stop] @ np.linalg.inv(corner).T
        matrix[start:stop, start:stop] = corner
        matrix[stop:, start:stop] = below
        matrix[start:stop, stop:] = 0
        matrix[stop:, stop:] -= below @ below.T
    return matrix


def solve(lower: Floats, right: Floats) -> Floats:
    """The X with L L^T X = `right`, for the factor L of `cholesky`."""
    starts = range(0, len(lower), _BLOCK)
    found = right.copy()
    for start in starts:
        here, corner = slice(start, start + _BLOCK), lower[start : start + _BLOCK, start : start + _BLOCK]
        found[here] = np.linalg.solve(corner, found[here] - lower[here, :start] @ found[:start])
    for start in reversed(starts):
        here, after = slice(start, start + _BLOCK), slice(start + _BLOCK, None)
        corner = lower[here, here].T
        found[here] = np.linalg.solve(corner, found[here] - lower[after, here].T @ found[after])
    return found
