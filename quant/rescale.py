"""Integers in groups with real scales as LPBQ: every step becomes a small integer times its channel's scale."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quant.weights import LPBQ_LEVELS, WEIGHT_TYPES, Grid, QuantizedWeight, WeightDtype

Floats = NDArray[np.float64]

_RATIOS = np.concatenate([np.arange(1, 8), np.arange(8, LPBQ_LEVELS + 0.75, 0.25)])
"""Candidates for a channel's widest step over its scale. Every whole one, so that multiples of one scale are found;
others from 8 on, since below 8 half the scale with twice the integers is as good."""


def rescale(integers: NDArray[np.int8], steps: NDArray[np.float32], dtype: WeightDtype) -> QuantizedWeight:
    """The integers of a matrix on the LPBQ grid that is closest to its own.

    Where the steps of a channel are multiples 1 to 15 of one scale, no integer changes. Else each is rounded to the
    nearest on the new grid, which changes few of them.

    Args:
        integers: `[in, out]`.
        steps: `[groups, out]`, above 0, of groups of as many inputs that follow each other.
        dtype: with blocks that divide the groups.

    Raises:
        ValueError: the blocks do not divide the groups.
    """
    block = WEIGHT_TYPES[dtype].block
    inputs, outputs = integers.shape
    if block is None or inputs % len(steps) or (inputs // len(steps)) % block:
        raise ValueError(f"steps: got {len(steps)} groups of {inputs} inputs; expected a multiple of {block} in each")
    target_steps = np.repeat(steps.astype(np.float64), inputs // len(steps) // block, axis=0)
    blocks = integers.reshape(-1, block, outputs).astype(np.float32)
    energy = np.maximum(np.square(blocks).sum(axis=1, dtype=np.float64), 1e-6)
    scales, levels = _closest(target_steps, energy)
    grid = Grid(dtype, scales.astype(np.float32), levels.astype(np.uint8))
    blocks *= (target_steps / (grid.scales * levels))[:, None].astype(np.float32)
    np.clip(np.rint(blocks, out=blocks), *grid.limits, out=blocks)
    return QuantizedWeight(blocks.reshape(inputs, outputs).astype(np.int8), grid)


def _closest(steps: Floats, energy: Floats) -> tuple[Floats, Floats]:
    """Scales `[out]` and levels `[blocks, out]` whose products have the least squared error, weighted by energy."""
    widest = steps.max(axis=0)
    best, best_error = widest / LPBQ_LEVELS, np.full(widest.shape, np.inf)
    for ratio in _RATIOS:
        coarse = widest / ratio
        for scales in (coarse, _fitted(steps, energy, _levels(steps, coarse))):
            error = (energy * np.square(steps - scales * _levels(steps, scales))).sum(axis=0)
            best, best_error = np.where(error < best_error, scales, best), np.minimum(error, best_error)
    return best, _levels(steps, best)


def _fitted(steps: Floats, energy: Floats, levels: Floats) -> Floats:
    """The scales of least squared error for given levels."""
    fitted: Floats = (energy * steps * levels).sum(axis=0) / (energy * np.square(levels)).sum(axis=0)
    return fitted


def _levels(steps: Floats, scales: Floats) -> Floats:
    levels: Floats = np.clip(np.rint(steps / scales), 1, LPBQ_LEVELS)
    return levels
