"""From a real matrix to integers: rounding to nearest, range search, GPTQ, and coordinate descent after it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quant.cholesky import cholesky
from quant.descent import descend, descend_blocks, fed_back
from quant.grids import Limits, choose_grid, round_within
from quant.inputs import LayerInputs
from quant.products import one_thread
from quant.weights import WEIGHT_TYPES, Grid, QuantizedWeight, WeightDtype

Method = Literal["nearest", "search", "gptq", "descent", "blocks", "attention"]
FITTED: frozenset[str] = frozenset({"gptq", "descent", "blocks", "attention"})
"""The methods that fit integers to calibration text."""

Floats = NDArray[np.float32]

_COLUMNS_AT_ONCE = 1024
_SWEEPS = 2  # over the columns of heads


def quantize(
    weight: NDArray[Any],
    dtype: WeightDtype,
    method: Method,
    inputs: LayerInputs | None,
    grid: Grid | None = None,
    *,
    outputs: Floats | None = None,
) -> QuantizedWeight:
    """Integers for a matrix `[in, out]`. The same arguments always give the same integers.

    `nearest` covers the maximum magnitude and rounds. `search` clips where that lowers the output error. `gptq` also
    compensates the error of earlier layers in its inputs, and the error of rounded rows in those not yet rounded.
    `descent` then changes single integers as long as that lowers the error, and `blocks` those of a block together,
    with the scale of the block. `attention` does what `descent` does where errors of outputs cost unequally: for query
    heads. Columns are processed in chunks.

    Args:
        inputs: of the matrix; `nearest` needs none.
        grid: of the result, of this type; None to choose it.
        outputs: `[heads, D, D]`, F of each head's columns, positive definite, for `attention`: the sum over heads of
            tr(F E^T H E) becomes small, E being the error of its columns.

    Raises:
        ValueError: the shape does not fit the type, or `inputs` or `outputs` are missing.
    """
    block = WEIGHT_TYPES[dtype].block
    if weight.ndim != 2 or (block and len(weight) % block):
        raise ValueError(f"weight: got shape {weight.shape}; expected [in, out], in a multiple of {block or 1}")
    if method != "nearest" and inputs is None:
        raise ValueError(f"inputs: got none; expected those of the matrix, which {method} needs")
    if (method == "attention") != (outputs is not None):
        raise ValueError(f"outputs: got {'none' if outputs is None else 'some'} with {method}; attention needs them")
    width = 1 if outputs is None else outputs.shape[1]
    integers = np.empty(weight.shape, np.int8)
    grids = []
    at_once = max(1, _COLUMNS_AT_ONCE // width) * width
    for start in range(0, weight.shape[1], at_once):
        columns = slice(start, start + at_once)
        own_grid = None if grid is None else grid.columns(columns.start, columns.stop)
        if method in FITTED and inputs is not None:
            costs = None if outputs is None else outputs[start // width : (start + at_once) // width]
            grids.append(_gptq(weight, columns, own_grid or dtype, method, inputs, integers, costs))
            continue
        part = np.ascontiguousarray(weight[:, columns], np.float32)
        importance = None if inputs is None or method == "nearest" else inputs.importance
        grids.append(own_grid or choose_grid(part, dtype, importance))
        integers[:, columns] = _rounded(part, grids[-1])
    return QuantizedWeight(integers, Grid.joined(grids))


def quantize_per_channel(weight: NDArray[Any]) -> QuantizedWeight:
    """int8 for a matrix `[in, out]`; 127 represents the maximum magnitude of a channel."""
    return quantize(weight, "int8", "nearest", None)


@one_thread()
def _gptq(
    weight: Floats,
    columns: slice,
    grid_or_type: WeightDtype | Grid,
    method: Method,
    inputs: LayerInputs,
    integers: NDArray[np.int8],
    outputs: Floats | None,
) -> Grid:
    """GPTQ (Frantar et al. 2022, arXiv 2210.17323), in the form of LDLQ (Chee et al. 2023, arXiv 2307.13304).

    With H = A D A^T, A unit upper triangular, row k is rounded after the errors of earlier rows, weighted by column k
    of A, were added to it: the least squared output error that feedback can reach. Rows with a larger diagonal in H
    come first. The rounded matrix is the one that `LayerInputs.compensated` describes. For `descent` and `blocks` see
    `quant.descent`; with `outputs`, `_weighed`.

    Returns:
        The grid of the columns; their integers are written to `integers`.
    """
    if method != "gptq":
        _ = inputs.hessian  # costs a product more behind the factor
    order, factor = inputs.order, inputs.factor
    target = inputs.compensated(weight, columns)
    if isinstance(grid_or_type, Grid):
        grid = grid_or_type
    else:
        straight = np.empty_like(target)
        straight[order] = target
        grid = choose_grid(straight, grid_or_type, inputs.importance + inputs.damping)
        del straight
    steps = grid.steps(len(target))[order]
    if outputs is not None:
        rounded = _weighed(target, steps, grid.limits, inputs, outputs)
    else:
        rounded = fed_back(target, steps, grid.limits, factor)
    if method == "descent":
        descend(target, rounded, steps, grid.limits, inputs.hessian)
    if method == "blocks":
        keeps_grid = isinstance(grid_or_type, Grid)
        grid = descend_blocks(target, rounded, grid, order, inputs.hessian, keeps_grid=keeps_grid)
    integers[order, columns] = rounded
    return grid


def _weighed(target: Floats, steps: Floats, limits: Limits, inputs: LayerInputs, outputs: Floats) -> NDArray[np.int8]:
    """Integers whose errors cancel between the columns of a head, too (YAQA, Tseng et al. 2025, arXiv 2505.22988).

    Columns with the same place in their heads are rounded together, after the errors of those before them were added
    as for rows. Then each place in turn descends to the best integers for all others: with them fixed, the error is
    that of a matrix alone, from a target moved by their errors.

    Args:
        target: `[in, out]`, rows in the order of `inputs`.
        steps: `[in, out]`, between neighbouring integers.
        limits: the minimum and maximum integer.
        inputs: of the matrix.
        outputs: see `quantize`.
    """
    shape = (len(target), *outputs.shape[:2])
    target_by_head, step, errors = (
        target.reshape(shape),
        np.ascontiguousarray(steps).reshape(shape),
        np.zeros(shape, np.float32),
    )
    rounded = np.empty(shape, np.int8)
    factors = np.stack([cholesky(output_hessian.copy()) for output_hessian in outputs])
    factors /= np.diagonal(factors, axis1=1, axis2=2)[:, None]
    scaled = outputs / np.diagonal(outputs, axis1=1, axis2=2)[:, None]
    for sweep in range(_SWEEPS + 1):
        for place in range(shape[2]):
            weights = (scaled if sweep else factors)[:, :, place].copy()
            weights[:, place] = 0
            moved = target_by_head[:, :, place] + np.einsum("ihc,hc->ih", errors, weights)
            its_steps = np.ascontiguousarray(step[:, :, place])
            if not sweep:
                integers = fed_back(moved, its_steps, limits, inputs.factor)
            else:
                integers = np.ascontiguousarray(rounded[:, :, place])
                descend(moved, integers, its_steps, limits, inputs.hessian, max_sweeps=1)
            rounded[:, :, place] = integers
            errors[:, :, place] = target_by_head[:, :, place] - integers * its_steps
    return rounded.reshape(target.shape)


def _rounded(weight: Floats, grid: Grid) -> Floats:
    scaled = weight / grid.steps(len(weight))
    return round_within(scaled, grid.limits, out=scaled)
