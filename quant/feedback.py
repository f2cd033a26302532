"""Rounding with feedback: the error of each row is made up for by the rows behind it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quant.grids import Limits, round_within

Floats = NDArray[np.float32]

_ROWS_AT_ONCE = 256
_ROWS_IN_CACHE = 32


def fed_back(target: Floats, steps: Floats, limits: Limits, factor: Floats) -> NDArray[np.int8]:
    """The integers that GPTQ finds for a matrix.

    Args:
        target: `[in, out]`, the matrix, rows in the order of `factor`.
        steps: `[in, out]`, between neighbouring integers.
        limits: the minimum and maximum integer.
        factor: `[in, in]`, U, upper triangular; the squared output error is that of U^T (target - rounded * steps).
    """
    pivots = np.diagonal(factor)
    errors = np.empty_like(target)
    rounded = np.empty(target.shape, np.int8)
    for start in range(0, len(target), _ROWS_AT_ONCE):
        here = slice(start, start + _ROWS_AT_ONCE)
        feedback = factor[: here.stop, here] / pivots[here]
        corrected = target[here] + feedback[:start].T @ errors[:start]
        _feed_back(corrected, feedback[start:], target[here], steps[here], limits, errors[here], rounded[here])
    return rounded


def _feed_back(
    moved_target: Floats,
    feedback: Floats,
    target: Floats,
    steps: Floats,
    limits: Limits,
    errors: Floats,
    rounded: NDArray[np.int8],
) -> None:
    """Round rows one after another; `feedback`, `[rows, rows]`, carries their errors to later rows."""
    for start in range(0, len(moved_target), _ROWS_IN_CACHE):
        stop = min(start + _ROWS_IN_CACHE, len(moved_target))
        for row in range(start, stop):
            corrected = moved_target[row]
            corrected += feedback[start:row, row] @ errors[start:row]
            corrected /= steps[row]
            rounded[row] = round_within(corrected, limits, out=corrected)
            corrected *= steps[row]
            np.subtract(target[row], corrected, out=errors[row])
        moved_target[stop:] += feedback[start:stop, stop:].T @ errors[start:stop]
