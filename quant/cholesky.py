"""Cholesky factors by blocks; numpy's own routines are several times slower on large matrices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quant.products import product

Floats = NDArray[np.float32]
_BLOCK = 128
"""Rows of a block: BLAS factors 256 with its threads, whose number then changes the last bits."""


def cholesky(matrix: Floats) -> Floats:
    """The upper triangular U with U U^T = `matrix`, which is overwritten.

    Column blocks are computed from the last to the first, each from all later ones in one product, so nothing as large
    as the matrix is allocated.

    Args:
        matrix: symmetric and positive definite.

    Raises:
        numpy.linalg.LinAlgError: it is not positive definite.
    """
    size = len(matrix)
    for start in reversed(range(0, size, _BLOCK)):
        stop = min(start + _BLOCK, size)
        here = slice(start, stop)
        panel = matrix[:stop, here] - product(matrix[:stop, stop:], matrix[here, stop:].T)
        corner = np.linalg.cholesky(panel[start:][::-1, ::-1])[::-1, ::-1]
        matrix[:start, here] = panel[:start] @ np.linalg.inv(corner).T
        matrix[here, here] = corner
        matrix[stop:, here] = 0
    return matrix


def corner_inverses(upper: Floats) -> list[Floats]:
    """The inverses of the blocks on the diagonal of such a U, for `solve`."""
    corners = (slice(start, start + _BLOCK) for start in range(0, len(upper), _BLOCK))
    return [np.linalg.inv(upper[corner, corner]) for corner in corners]


def solve(upper: Floats, inverses: list[Floats], right: Floats) -> Floats:
    """The X with U U^T X = `right`, which is overwritten, for the factor U of `cholesky`."""
    blocks = [(slice(i * _BLOCK, (i + 1) * _BLOCK), inverse) for i, inverse in enumerate(inverses)]
    for here, inverse in reversed(blocks):
        right[here] = inverse @ (right[here] - product(upper[here, here.stop :], right[here.stop :]))
    for here, inverse in blocks:
        right[here] = inverse.T @ (right[here] - product(upper[: here.start, here].T, right[: here.start]))
    return right
