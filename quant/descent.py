"""Coordinate descent on the integers of a matrix: what GPTQ's single pass leaves of the squared output error."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quant.grids import Limits, round_within
from quant.products import product

Floats = NDArray[np.float32]

_ROWS_AT_ONCE = 32
_MOST_SWEEPS = 6
_FEW = 1e-3  # of the integers; a sweep that changes no more is the last


def descend(
    target: Floats,
    rounded: NDArray[np.int8],
    steps: Floats,
    limits: Limits,
    hessian: Floats,
    *,
    most_sweeps: int = _MOST_SWEEPS,
) -> None:
    """Lower the output error tr((T - W)^T H (T - W)) of a rounded matrix W, row by row, in place.

    With all other rows fixed, the best value of row k is W_k - (H (W - T))_k / H_kk, rounded to its grid. Each step
    lowers the error or keeps it (QuantEase, Behdin et al. 2023, arXiv 2309.01885).

    Args:
        target: `[in, out]`, T, the matrix before rounding.
        rounded: `[in, out]`, the integers to improve.
        steps: `[in, out]`, between neighbouring integers.
        limits: the minimum and maximum integer.
        hessian: `[in, in]`, H, positive definite.
        most_sweeps: over all rows; fewer if the integers change no more.
    """
    slopes = product(hessian, rounded * steps - target)
    for _ in range(most_sweeps):
        changed = 0
        for start in range(0, len(rounded), _ROWS_AT_ONCE):
            here = slice(start, start + _ROWS_AT_ONCE)
            moves = _descend_rows(rounded[here], slopes[here].copy(), steps[here], limits, hessian[here, here])
            if moves.any():
                slopes += hessian[:, here] @ moves
                changed += np.count_nonzero(moves)
        if changed <= _FEW * rounded.size:
            break


def _descend_rows(rounded: NDArray[np.int8], slopes: Floats, steps: Floats, limits: Limits, hessian: Floats) -> Floats:
    """One pass over a few rows; returns by how much their values changed."""
    moves = np.empty_like(slopes)
    for row in range(len(rounded)):
        before = rounded[row].astype(np.float32)
        best = before - slopes[row] / (hessian[row, row] * steps[row])
        round_within(best, limits, out=best)
        moves[row] = (best - before) * steps[row]
        rounded[row] = best
        slopes[row + 1 :] += hessian[row + 1 :, row, None] * moves[row]
    return moves
