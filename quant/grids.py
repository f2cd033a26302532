"""The choice of a matrix's grid: how far it reaches, and where clipping costs less than wide steps."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from quant.weights import LPBQ_LEVELS, Grid, WeightDtype, block_rows, integer_limits

Floats = NDArray[np.float32]
Limits = tuple[int, int]

_CLIPS = np.linspace(1.0, 0.6, 21, dtype=np.float32)
_BLOCK_CLIPS = np.linspace(1.0, 0.6, 9, dtype=np.float32)
_COLUMNS_AT_ONCE = 512
_ROWS_AT_ONCE = 256  # with the columns, what stays in a core's cache
_WORKERS = min(8, os.cpu_count() or 1)
_TINY = np.finfo(np.float32).tiny


def choose_grid(weight: Floats, dtype: WeightDtype, importance: Floats | None = None) -> Grid:
    """A grid for a matrix `[in, out]`.

    Without `importance` it reaches each channel's (and block's) greatest magnitude. With it, `[in]`, the mean square
    of each input, it is the clipped one with the least error of the output, as if inputs were independent.
    """
    limits = integer_limits(dtype)
    block = block_rows(dtype)

    def part(start: int) -> tuple[Floats, NDArray[np.uint8] | None]:
        columns = weight[:, start : start + _COLUMNS_AT_ONCE]
        if block is None:
            return _channels(columns, limits, importance), None
        return _blocks(columns, block, limits, importance)

    with ThreadPoolExecutor(_WORKERS) as workers:
        parts = list(workers.map(part, range(0, weight.shape[1], _COLUMNS_AT_ONCE)))
    scales = np.concatenate([scales for scales, _ in parts])
    levels = [levels for _, levels in parts if levels is not None]
    return Grid(dtype, scales, np.concatenate(levels, axis=1) if levels else None)


def _channels(weight: Floats, limits: Limits, importance: Floats | None) -> Floats:
    """`[out]`, a scale for each channel."""
    covering = np.maximum(_absmax(weight) / np.float32(limits[1]), _TINY)
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


def _blocks(weight: Floats, block: int, limits: Limits, importance: Floats | None) -> tuple[Floats, NDArray[np.uint8]]:
    """Scales `[out]` and block scales `[in / block, out]`, such that a channel's widest block has block scale 15.

    Of the clipped scales of a channel, each with the best block scales that it allows, the one of least error wins.
    """
    blocks = weight.reshape(-1, block, weight.shape[1])
    covering = np.maximum(np.stack([_absmax(each) for each in blocks]) / np.float32(limits[1]), _TINY)
    scales = np.maximum(covering.max(axis=0) / np.float32(LPBQ_LEVELS), _TINY)
    if importance is None:
        return scales, _levels(covering / scales).astype(np.uint8)
    weights = importance.reshape(-1, block)
    levels = np.empty((len(_BLOCK_CLIPS), *covering.shape), np.uint8)
    errors = np.zeros((len(_BLOCK_CLIPS), weight.shape[1]), np.float32)
    at_once = max(1, _ROWS_AT_ONCE // block)
    scratch = np.empty((2, at_once, block, weight.shape[1]), np.float32)
    for first in range(0, len(blocks), at_once):
        here = slice(first, first + at_once)
        group = np.ascontiguousarray(blocks[here])
        for clip, level, error in zip(_BLOCK_CLIPS, levels, errors, strict=True):
            level[here], least = _block_scales(group, covering[here], scales * clip, weights[here], limits, scratch)
            error += least.sum(axis=0)
    best = errors.argmin(axis=0)
    chosen = np.take_along_axis(levels, best[None, None], axis=0)[0]
    clipped: Floats = scales * _BLOCK_CLIPS[best]
    return clipped, chosen


def _block_scales(
    group: Floats, covering: Floats, scales: Floats, weights: Floats, limits: Limits, scratch: Floats
) -> tuple[Floats, Floats]:
    """Of the block scales `[blocks, out]` that clip, those of least error, and that error."""
    best = tried = np.zeros_like(covering)
    least = np.full_like(covering, np.inf)
    for clip in _BLOCK_CLIPS:
        candidate = _levels(covering / scales * clip)
        if np.array_equal(candidate, tried):
            continue
        tried = candidate
        error = _error(group, candidate * scales, limits, weights, scratch)
        best, least = np.where(error < least, candidate, best), np.minimum(error, least)
    return best, least


def _levels(ratio: Floats) -> Floats:
    """Block scales that cover; a ratio that rounding lifted just above an integer is that integer."""
    levels: Floats = np.clip(np.ceil(ratio - np.float32(1e-4)), 1, LPBQ_LEVELS)
    return levels


def _absmax(weight: Floats) -> Floats:
    """`[out]`, the greatest magnitude of each column."""
    found: Floats = np.maximum(weight.max(axis=0), -weight.min(axis=0))
    return found


def _error(group: Floats, steps: Floats, limits: Limits, weights: Floats, scratch: Floats) -> Floats:
    """Weighted squared rounding error `[blocks, out]` of `[blocks, rows, out]`, with weights `[blocks, rows]`."""
    scaled = np.multiply(group, (1 / steps)[:, None], out=scratch[0, : len(group)])
    rounded = np.rint(scaled, out=scratch[1, : len(group)])
    least, most = limits
    np.minimum(rounded, np.float32(most), out=rounded)
    np.maximum(rounded, np.float32(least), out=rounded)
    rounded -= scaled
    rounded *= rounded
    total: Floats = (weights[:, None] @ rounded)[:, 0]
    total *= steps * steps
    return total
