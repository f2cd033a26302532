"""From a real matrix to integers: rounding to nearest, a search for the range, and GPTQ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quant.cholesky import cholesky, solve
from quant.weights import LPBQ_LEVELS, Grid, QuantizedWeight, WeightDtype, block_rows, weight_bits

Method = Literal["nearest", "search", "gptq"]
Floats = NDArray[np.float32]

_CLIPS = np.linspace(1.0, 0.6, 21, dtype=np.float32)
_BLOCK_CLIPS = np.linspace(1.0, 0.6, 9, dtype=np.float32)
_DAMPING = 0.1  # of the mean of the diagonal: a short calibration text wants more than the usual 0.01
_ROWS_AT_ONCE = 128
_COLUMNS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What a matrix is multiplied with, summed over all calibration tokens.

    Attributes:
        hessian: `[in, in]`, X^T X of the inputs X `[tokens, in]` that the quantized model gives it.
        drift: `[in, in]`, X^T (E - X), E being the inputs that the exact model gives it.
    """

    hessian: Floats
    drift: Floats

    @classmethod
    def of(cls, exact: Floats, quantized: Floats) -> LayerInputs:
        """Sums up inputs `[tokens, in]`."""
        return cls(quantized.T @ quantized, quantized.T @ (exact - quantized))


def quantize(weight: NDArray[Any], dtype: WeightDtype, method: Method, inputs: LayerInputs | None) -> QuantizedWeight:
    """Integers for a matrix `[in, out]`: a function of its arguments alone.

    `nearest` covers the greatest magnitude and rounds. `search` clips where that makes the output's error less.
    `gptq` does so on a matrix that also makes up for what quantization upstream did to its inputs, and lets the rows
    that are not rounded yet make up for the error of those that are.

    Raises:
        ValueError: the shape does not fit the type, or `inputs` are missing.
    """
    weight = np.ascontiguousarray(weight, np.float32)
    block = block_rows(dtype)
    if weight.ndim != 2 or (block and len(weight) % block):
        raise ValueError(f"weight: found shape {weight.shape}; wanted [in, out], in a multiple of {block or 1}")
    if method == "nearest":
        return _round(weight, choose_grid(weight, dtype))
    if inputs is None:
        raise ValueError(f"inputs: {method} needs them")
    importance = np.diagonal(inputs.hessian)
    if method == "search":
        return _round(weight, choose_grid(weight, dtype, importance))
    return gptq(weight, dtype, inputs)


def quantize_per_channel(weight: NDArray[Any]) -> QuantizedWeight:
    """int8 for a matrix `[in, out]`, the channel's greatest magnitude at 127."""
    return quantize(weight, "int8", "nearest", None)


def choose_grid(weight: Floats, dtype: WeightDtype, importance: Floats | None = None) -> Grid:
    """A grid for a matrix `[in, out]`.

    Without `importance` it reaches each channel's (and block's) greatest magnitude. With it, `[in]`, the mean square
    of each input, it is the clipped one with the least error of the output, as if inputs were independent.
    """
    most = int(2 ** (weight_bits(dtype) - 1)) - 1
    block = block_rows(dtype)
    parts = []
    for start in range(0, weight.shape[1], _COLUMNS_AT_ONCE):
        columns = weight[:, start : start + _COLUMNS_AT_ONCE]
        parts.append(_channels(columns, most, importance) if block is None else _blocks(columns, block, importance))
    scales = np.concatenate([scales for scales, _ in parts])
    if block is None:
        return Grid(dtype, scales)
    return Grid(dtype, scales, np.concatenate([blocks for _, blocks in parts], axis=1))


def gptq(weight: Floats, dtype: WeightDtype, inputs: LayerInputs) -> QuantizedWeight:
    """GPTQ (Frantar et al. 2022, arXiv 2210.17323), in the form of LDLQ (Chee et al. 2023, arXiv 2307.13304).

    With H = A D A^T, A unit upper triangular, row k is rounded after the errors of the rows before it were added
    to it, weighted by column k of A: the least squared output error that feedback can reach. Rows of greater
    diagonal in H come first. The matrix that is rounded is the one whose outputs on the quantized model's inputs are
    nearest to those of the exact model: W + (H + damping)^-1 X^T (E - X) W (as in GPTAQ, arXiv 2504.02692).
    """
    rows = len(weight)
    damped = inputs.hessian.copy()
    damped[np.diag_indices(rows)] += np.float32(_DAMPING) * np.diagonal(damped).mean() + np.finfo(np.float32).tiny
    importance = np.diagonal(damped).copy()
    rising = np.argsort(importance, kind="stable")
    order = rising[::-1]
    lower = cholesky(damped[np.ix_(rising, rising)])
    del damped
    target = weight.copy()
    target[rising] += solve(lower, (inputs.drift @ weight)[rising])
    lower /= np.diagonal(lower).copy()
    feedback = np.ascontiguousarray(lower[::-1, ::-1])
    del lower
    grid = choose_grid(target, dtype, importance)
    target, steps = target[order], grid.steps(rows)[order]
    integers = np.empty((rows, weight.shape[1]), np.int8)
    errors = np.zeros_like(target)
    for start in range(0, rows, _ROWS_AT_ONCE):
        stop = min(rows, start + _ROWS_AT_ONCE)
        wanted = target[start:stop] + feedback[:start, start:stop].T @ errors[:start]
        for row in range(start, stop):
            corrected = wanted[row - start] + feedback[start:row, row] @ errors[start:row]
            rounded = np.clip(np.rint(corrected / steps[row]), -grid.most, grid.most)
            integers[order[row]] = rounded
            errors[row] = target[row] - rounded * steps[row]
    return QuantizedWeight(integers, grid)


def _round(weight: Floats, grid: Grid) -> QuantizedWeight:
    scaled = weight / grid.steps(len(weight))
    np.clip(np.rint(scaled, out=scaled), -grid.most, grid.most, out=scaled)
    return QuantizedWeight(scaled.astype(np.int8), grid)


def _channels(weight: Floats, most: int, importance: Floats | None) -> tuple[Floats, NDArray[np.uint8]]:
    covering = np.maximum(np.abs(weight).max(axis=0) / np.float32(most), np.finfo(np.float32).tiny)
    best, least = covering, np.full(covering.shape, np.inf, np.float32)
    for clip in _CLIPS if importance is not None else ():
        error = _error(weight, covering * clip, most, importance)
        best, least = np.where(error < least, covering * clip, best), np.minimum(error, least)
    return best.astype(np.float32), np.empty((0, weight.shape[1]), np.uint8)


def _blocks(weight: Floats, block: int, importance: Floats | None) -> tuple[Floats, NDArray[np.uint8]]:
    """Scales and block scales. The channel's scale is such that its widest block has block scale 15."""
    blocks = weight.reshape(-1, block, weight.shape[1])
    covering = np.maximum(np.abs(blocks).max(axis=1) / np.float32(7), np.finfo(np.float32).tiny)
    scales = np.maximum(covering.max(axis=0) / np.float32(LPBQ_LEVELS), np.finfo(np.float32).tiny)
    chosen = _levels(covering / scales)
    if importance is None:
        return scales, chosen.astype(np.uint8)
    weights = importance.reshape(-1, block, 1)
    best_scales, best_levels = scales, chosen
    least = np.full(scales.shape, np.inf, np.float32)
    for clip in _BLOCK_CLIPS:
        levels, errors = chosen, np.full(covering.shape, np.inf, np.float32)
        for inner in _BLOCK_CLIPS:
            candidate = _levels(covering / (scales * clip) * inner)
            error = _error(blocks, (candidate * scales * clip)[:, None], 7, weights)
            levels, errors = np.where(error < errors, candidate, levels), np.minimum(error, errors)
        better = (total := errors.sum(axis=0)) < least
        best_scales, best_levels = np.where(better, scales * clip, best_scales), np.where(better, levels, best_levels)
        least = np.minimum(total, least)
    return best_scales.astype(np.float32), best_levels.astype(np.uint8)


def _levels(ratio: Floats) -> Floats:
    """Block scales that cover; a ratio that rounding lifted just above an integer is that integer."""
    levels: Floats = np.clip(np.ceil(ratio - np.float32(1e-4)), 1, LPBQ_LEVELS)
    return levels


def _error(weight: Floats, steps: Floats, most: int, importance: Floats | None) -> Floats:
    """Squared rounding error, summed over the rows."""
    rounded = np.clip(np.rint(weight / steps), -most, most)
    squares = np.square(rounded * steps - weight)
    if importance is not None:
        squares *= importance if importance.ndim == weight.ndim else importance[:, None]
    total: Floats = squares.sum(axis=-2)
    return total
