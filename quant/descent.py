"""GPTQ's single pass over a matrix, and descent on its integers and the scales of its blocks: what the pass leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quant.cholesky import cholesky, corner_inverses, solve
from quant.grids import Limits, round_within
from quant.products import product
from quant.weights import LPBQ_LEVELS, Grid

Floats = NDArray[np.float32]

_ROWS_AT_ONCE = 256
_ROWS_IN_CACHE = 32
_MAX_SWEEPS = 6
_FEW = 5e-3  # of the integers; a sweep that changes no more is the last: those behind it gain little
_ROUNDS = 3
_SWEEPS_BETWEEN = 2  # over single rows: within a block, and between two rounds
_BLOCK = 64  # rows, of types without blocks
_MOVES = np.array([0, -1, 1])  # of a block scale in one round
_MIN_GAIN = 1e-6  # of a block's error


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


def descend(
    target: Floats,
    rounded: NDArray[np.int8],
    steps: Floats,
    limits: Limits,
    hessian: Floats,
    *,
    max_sweeps: int = _MAX_SWEEPS,
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
        max_sweeps: over all rows; fewer if the integers change no more.
    """
    slopes = product(hessian, rounded * steps - target)
    moves = np.zeros_like(slopes)  # those of rows that come next are of the sweep before
    for sweep in range(max_sweeps):
        changed = 0
        for start in range(0, len(rounded), _ROWS_AT_ONCE):
            here, moved = slice(start, start + _ROWS_AT_ONCE), slice(None if sweep else start)
            slopes[here] += product(hessian[here, moved], moves[moved])
            moves[here] = _descend_part(rounded[here], slopes[here].copy(), steps[here], limits, hessian[here, here])
            changed += np.count_nonzero(moves[here])
        if changed <= _FEW * rounded.size:
            break


def _descend_part(rounded: NDArray[np.int8], slopes: Floats, steps: Floats, limits: Limits, hessian: Floats) -> Floats:
    """One pass over some rows, with their `slopes` as scratch; returns by how much their values changed."""
    moves = np.empty_like(slopes)
    for start in range(0, len(rounded), _ROWS_IN_CACHE):
        stop = min(start + _ROWS_IN_CACHE, len(rounded))
        here = slice(start, stop)
        moves[here] = _descend_rows(rounded[here], slopes[here], steps[here], limits, hessian[here, here])
        slopes[stop:] += hessian[stop:, here] @ moves[here]
    return moves


def _descend_rows(rounded: NDArray[np.int8], slopes: Floats, steps: Floats, limits: Limits, hessian: Floats) -> Floats:
    """One pass over a few rows; returns by how much their values changed."""
    before, per_step, curvatures = rounded.astype(np.float32), 1 / steps, np.diagonal(hessian)[:, None]
    best, relative = before - slopes * (per_step / curvatures), hessian / curvatures
    moves = np.empty_like(best)
    for row, integers in enumerate(best):
        earlier = relative[row, :row] @ moves[:row]
        earlier *= per_step[row]
        integers -= earlier
        round_within(integers, limits, out=integers)
        np.subtract(integers, before[row], out=moves[row])
        moves[row] *= steps[row]
    rounded[:] = best
    return moves


def descend_blocks(
    target: Floats,
    rounded: NDArray[np.int8],
    grid: Grid,
    order: NDArray[np.intp],
    hessian: Floats,
    *,
    keeps_grid: bool,
) -> Grid:
    """Lower the output error of a rounded matrix block by block, in place, and learn the scales of the blocks with it.

    With all other rows fixed, the best real values of the rows B are W_B - H_BB^-1 (H (W - T))_B. They are rounded with
    feedback, on the steps that the block has and on those of the block scales beside it; each column takes what lowers
    its error most. `descend` follows. So 64 integers change together where no single one could, and a block scale is
    chosen by the error that is left after rounding, where `choose_grid` has to take inputs as independent. (AdaScale in
    Qualcomm's AIMET learns scales, too, with gradients.)

    Args:
        target: `[in, out]`, T, the matrix before rounding, rows in `order`.
        rounded: `[in, out]`, the integers to improve, rows in `order`.
        grid: of the integers.
        order: `[in]`, the inputs by descending diagonal of H.
        hessian: `[in, in]`, H, positive definite, rows and columns in `order`.
        keeps_grid: learn no scales.

    Returns:
        The grid with the scales that were learned.
    """
    block = grid.type.block or _BLOCK
    parts = [np.flatnonzero(order // block == number) for number in range(-(-len(order) // block))]
    factors = [cholesky(hessian[np.ix_(rows, rows)]) for rows in parts]
    inverses = [corner_inverses(factor) for factor in factors]
    learned = None if keeps_grid or grid.block_scales is None else grid.block_scales.copy()
    for remaining in reversed(range(_ROUNDS)):
        steps = grid.steps(len(target))[order]
        slopes = product(hessian, rounded * steps - target)
        for number, (rows, factor) in enumerate(zip(parts, factors, strict=True)):
            before = rounded[rows] * steps[rows]
            away = solve(factor, inverses[number], slopes[rows])
            levels = None if learned is None else _near(learned[number])
            tried = steps[rows[:1]] if levels is None else levels * grid.scales
            part = hessian[np.ix_(rows, rows)]
            integers, errors = _rounded_together(before - away, tried, grid.limits, factor, part)
            best = errors.argmin(axis=0)[None]
            gains = _chosen(errors, best) < (1 - _MIN_GAIN) * np.square(product(factor.T, away)).sum(axis=0)
            rounded[rows] = np.where(gains, _chosen(integers, best[None]), rounded[rows])
            steps[rows] = np.where(gains, _chosen(tried, best), steps[rows])
            if learned is not None and levels is not None:
                learned[number] = np.where(gains, _chosen(levels, best), learned[number])
            slopes += product(hessian[:, rows], rounded[rows] * steps[rows] - before)
        if learned is not None:
            grid = replace(grid, block_scales=learned.copy())
        sweeps = _SWEEPS_BETWEEN if remaining else _MAX_SWEEPS
        descend(target, rounded, steps, grid.limits, hessian, max_sweeps=sweeps)
    return grid


def _near(levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Block scales `[out]`, and those beside them, `[tries, out]`."""
    tried_levels: NDArray[np.uint8] = np.clip(levels + _MOVES[:, None], 1, LPBQ_LEVELS).astype(np.uint8)
    return tried_levels


def _chosen(tries: NDArray[Any], best: NDArray[np.intp]) -> NDArray[Any]:
    """`[..., out]` of `[..., tries, out]`, for the number of a try in each column."""
    chosen: NDArray[Any] = np.take_along_axis(tries, best, -2)[..., 0, :]
    return chosen


def _rounded_together(
    target: Floats, steps: Floats, limits: Limits, factor: Floats, hessian: Floats
) -> tuple[NDArray[np.int8], Floats]:
    """Integers of a block on several steps, and their errors `[tries, out]`.

    Args:
        target: `[rows, out]`, the best real values.
        steps: `[tries, out]`.
        limits: the minimum and maximum integer.
        factor: of H_BB.
        hessian: H_BB.

    Returns:
        The integers `[rows, tries, out]`, and the errors.
    """
    tries, columns = steps.shape
    repeated = np.tile(target, tries)
    spread = np.repeat(steps.reshape(1, -1), len(target), axis=0)
    integers = fed_back(repeated, spread, limits, factor)
    descend(repeated, integers, spread, limits, hessian, max_sweeps=_SWEEPS_BETWEEN)
    errors: Floats = np.square(product(factor.T, repeated - integers * spread)).sum(axis=0)
    return integers.reshape(len(target), tries, columns), errors.reshape(tries, columns)
