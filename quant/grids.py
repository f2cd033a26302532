"""Chooses the grid of a matrix: its range, and clipping where that costs less than wide steps."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from quant.weights import LPBQ_LEVELS, WEIGHT_TYPES, Grid, WeightDtype

Floats = NDArray[np.float32]
Limits = tuple[int, int]

_CLIPS = np.linspace(1.0, 0.6, 21, dtype=np.float32)
_CHANNEL_CLIPS = np.linspace(1.0, 0.6, 9, dtype=np.float32)
_STEPS = np.linspace(0.6, 1.2, 13, dtype=np.float32)  # candidates for every block, relative to the step that covers it
_MIN_COVERING = 1 / 8  # of a channel's scale; a block that needs less is rounded to zeros
_COLUMNS_AT_ONCE = 512
_ROWS_AT_ONCE = 256  # with the columns, fits in a core's cache
_WORKERS = min(8, os.cpu_count() or 1)
_TINY = np.finfo(np.float32).tiny
NARROWEST = 2.0**-14
"""The narrowest channel, relative to the widest one of a matrix. The HTP computes something else with scales much
smaller than the others, such as those of a channel that is 0 but for float32's rounding."""


def choose_grid(weight: Floats, dtype: WeightDtype, importance: Floats | None = None) -> Grid:
    """A grid for a matrix `[in, out]`.

    Without `importance` it covers the maximum magnitude of each channel or block. With it (`[in]`, the mean square of
    each input) it is the clipped grid with the smallest output error, assuming independent inputs.
    """
    limits, block = WEIGHT_TYPES[dtype].limits, WEIGHT_TYPES[dtype].block
    min_scale = max(float(_absmax(weight).max()) * NARROWEST / limits[1], float(_TINY))

    def part(start: int) -> tuple[Floats, NDArray[np.uint8] | None]:
        columns = weight[:, start : start + _COLUMNS_AT_ONCE]
        if block is None:
            return _channels(columns, limits, importance, min_scale), None
        return _blocks(columns, block, limits, importance, min_scale)

    with ThreadPoolExecutor(_WORKERS) as workers:
        parts = list(workers.map(part, range(0, weight.shape[1], _COLUMNS_AT_ONCE)))
    scales = np.concatenate([scales for scales, _ in parts])
    levels = [levels for _, levels in parts if levels is not None]
    return Grid(dtype, scales, np.concatenate(levels, axis=1) if levels else None)


def round_within(values: Floats, limits: Limits, *, out: Floats) -> Floats:
    """The nearest integers within limits, written to `out`, which may be `values`."""
    np.rint(values, out=out)
    min_level, max_level = _levels_of(limits, values.shape[-1])
    np.minimum(out, max_level, out=out)
    np.maximum(out, min_level, out=out)
    return out


@lru_cache(maxsize=64)
def _levels_of(limits: Limits, width: int) -> tuple[Floats, Floats]:
    """The limits, each as a row: numpy is slower with a scalar."""
    lowest, highest = (np.full(width, limit, np.float32) for limit in limits)
    return lowest, highest


def _channels(weight: Floats, limits: Limits, importance: Floats | None, min_scale: float) -> Floats:
    """`[out]`, a scale for each channel, of at least `min_scale` before clipping."""
    covering = np.maximum(_absmax(weight) / np.float32(limits[1]), np.float32(min_scale))
    if importance is None:
        return covering
    errors = np.zeros((len(_CLIPS), weight.shape[1]), np.float32)
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        group = np.ascontiguousarray(weight[rows])[None]
        scratch = np.empty((2, *group.shape), np.float32)
        for clip, error in zip(_CLIPS, errors, strict=True):
            error += _error(group, (covering * clip)[None], limits, importance[None, rows], scratch)[0]
    scales: Floats = covering * _CLIPS[errors.argmin(axis=0)]
    return scales


def _blocks(
    weight: Floats, block: int, limits: Limits, importance: Floats | None, min_scale: float
) -> tuple[Floats, NDArray[np.uint8]]:
    """Scales `[out]` and block scales `[in / block, out]`; the widest block of a channel has block scale 15.

    With `importance`, the clipped scale of least error for each channel, each with its best block scales.
    """
    blocks = weight.reshape(-1, block, weight.shape[1])
    covering = np.maximum(np.stack([_absmax(block_rows) for block_rows in blocks]) / np.float32(limits[1]), _TINY)
    scales = np.maximum(covering.max(axis=0), np.float32(min_scale)) / np.float32(LPBQ_LEVELS)
    scales = np.maximum(scales, _TINY)
    if importance is None:
        return scales, _levels(covering / scales).astype(np.uint8)
    errors = _errors(blocks, covering, limits, importance.reshape(-1, block))
    best = scales
    lowest = np.full_like(scales, np.inf)
    chosen = np.zeros_like(covering)
    for clip in _CHANNEL_CLIPS:
        levels, error = _block_scales(errors, covering / (scales * clip))
        better = error < lowest
        best, lowest, chosen = (
            np.where(better, scales * clip, best),
            np.minimum(error, lowest),
            np.where(better, levels, chosen),
        )
    return best, chosen.astype(np.uint8)


def _errors(blocks: Floats, covering: Floats, limits: Limits, weights: Floats) -> Floats:
    """`[steps, in / block, out]`, the error of rounding to multiples of each of `_STEPS` times `covering`."""
    errors = np.empty((len(_STEPS), *covering.shape), np.float32)
    at_once = max(1, _ROWS_AT_ONCE // blocks.shape[1])
    scratch = np.empty((2, at_once, *blocks.shape[1:]), np.float32)
    for first in range(0, len(blocks), at_once):
        here = slice(first, first + at_once)
        group = np.ascontiguousarray(blocks[here])
        for step, error in zip(_STEPS, errors, strict=True):
            error[here] = _error(group, covering[here] * step, limits, weights[here], scratch)
    return errors


def _block_scales(errors: Floats, covering: Floats) -> tuple[Floats, Floats]:
    """The block scales of least error, `[in / block, out]`, and the error of each channel, `[out]`.

    Errors between the steps that were tried are interpolated.

    Args:
        errors: see `_errors`.
        covering: `[in / block, out]`, the block scales that cover, as real numbers.
    """
    covering = np.maximum(covering, np.float32(_MIN_COVERING))
    best = np.zeros_like(covering)
    best_error = np.full_like(covering, np.inf)
    widest = _levels(covering)
    for fewer in range(math.ceil(LPBQ_LEVELS * (1 - float(_STEPS[0])))):
        levels = np.maximum(widest - fewer, 1)
        error = _between(errors, levels / covering)
        better = error < best_error
        best, best_error = np.where(better, levels, best), np.where(better, error, best_error)
    return best, best_error.sum(axis=0)


def _between(errors: Floats, steps: Floats) -> Floats:
    """Errors at `steps`, relative to the covering one; infinite below those tried, quadratic above."""
    place = (steps - _STEPS[0]) / (_STEPS[1] - _STEPS[0])
    left = np.clip(place.astype(np.intp), 0, len(_STEPS) - 2)
    below = np.take_along_axis(errors, left[None], axis=0)[0]
    above = np.take_along_axis(errors, left[None] + 1, axis=0)[0]
    part = np.clip(place - left, 0, 1)
    costs: Floats = (below + (above - below) * part) * np.maximum(steps / _STEPS[-1], 1) ** 2
    costs[place < -1e-3] = np.inf
    return costs


def _levels(ratio: Floats) -> Floats:
    """Block scales that cover; the tolerance undoes rounding just above an integer."""
    levels: Floats = np.clip(np.ceil(ratio - np.float32(1e-4)), 1, LPBQ_LEVELS)
    return levels


def _absmax(weight: Floats) -> Floats:
    """`[out]`, the maximum magnitude of each column."""
    maximum: Floats = np.maximum(weight.max(axis=0), -weight.min(axis=0))
    return maximum


def _error(group: Floats, steps: Floats, limits: Limits, weights: Floats, scratch: Floats) -> Floats:
    """Weighted squared rounding error `[blocks, out]` of `[blocks, rows, out]`, with weights `[blocks, rows]`."""
    scaled = np.multiply(group, (1 / steps)[:, None], out=scratch[0, : len(group)])
    rounded = round_within(scaled, limits, out=scratch[1, : len(group)])
    rounded -= scaled
    rounded *= rounded
    rounded *= weights[..., None]
    total: Floats = rounded.sum(axis=1)
    total *= steps * steps
    return total
