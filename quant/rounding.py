"""From a real matrix to integers: rounding to nearest, range search, GPTQ, and coordinate descent after it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quant.descent import descend
from quant.grids import choose_grid, round_within
from quant.inputs import LayerInputs
from quant.weights import WEIGHT_TYPES, Grid, QuantizedWeight, WeightDtype

Method = Literal["nearest", "search", "gptq", "descent"]
Floats = NDArray[np.float32]

_COLUMNS_AT_ONCE = 1024
_ROWS_AT_ONCE = 256
_ROWS_IN_CACHE = 32


def quantize(
    weight: NDArray[Any], dtype: WeightDtype, method: Method, inputs: LayerInputs | None, grid: Grid | None = None
) -> QuantizedWeight:
    """Integers for a matrix `[in, out]`. The same arguments always give the same integers.

    `nearest` covers the maximum magnitude and rounds. `search` clips where that lowers the output error. `gptq` also
    compensates the error of earlier layers in its inputs, and the error of rounded rows in those not yet rounded.
    `descent` then changes single integers as long as that lowers the error. Columns are processed in chunks.

    Args:
        weight: the matrix.
        dtype: its type.
        method: see above.
        inputs: of the matrix; `nearest` needs none.
        grid: of the result, of this type; None to choose it.

    Raises:
        ValueError: the shape does not fit the type, or `inputs` are missing.
    """
    block = WEIGHT_TYPES[dtype].block
    if weight.ndim != 2 or (block and len(weight) % block):
        raise ValueError(f"weight: got shape {weight.shape}; expected [in, out], in a multiple of {block or 1}")
    if method != "nearest" and inputs is None:
        raise ValueError(f"inputs: got none; expected those of the matrix, which {method} needs")
    integers = np.empty(weight.shape, np.int8)
    grids = []
    for start in range(0, weight.shape[1], _COLUMNS_AT_ONCE):
        columns = slice(start, start + _COLUMNS_AT_ONCE)
        given = None if grid is None else grid.columns(columns.start, columns.stop)
        if method in ("gptq", "descent") and inputs is not None:
            grids.append(_gptq(weight, columns, given or dtype, inputs, integers, descent=method == "descent"))
            continue
        part = np.ascontiguousarray(weight[:, columns], np.float32)
        importance = None if inputs is None or method == "nearest" else inputs.importance
        grids.append(given or choose_grid(part, dtype, importance))
        integers[:, columns] = _rounded(part, grids[-1])
    return QuantizedWeight(integers, Grid.joined(grids))


def quantize_per_channel(weight: NDArray[Any]) -> QuantizedWeight:
    """int8 for a matrix `[in, out]`; 127 represents the maximum magnitude of a channel."""
    return quantize(weight, "int8", "nearest", None)


def _gptq(
    weight: Floats,
    columns: slice,
    wanted: WeightDtype | Grid,
    inputs: LayerInputs,
    integers: NDArray[np.int8],
    *,
    descent: bool,
) -> Grid:
    """GPTQ (Frantar et al. 2022, arXiv 2210.17323), in the form of LDLQ (Chee et al. 2023, arXiv 2307.13304).

    With H = A D A^T, A unit upper triangular, row k is rounded after the errors of earlier rows, weighted by column k
    of A, were added to it: the least squared output error that feedback can reach. Rows with a larger diagonal in H
    come first. The rounded matrix is the one that `LayerInputs.compensated` describes. With `descent`, see
    `quant.descent`.

    Returns:
        The grid of the columns; their integers are written to `integers`.
    """
    order, factor = inputs.order, inputs.factor
    target = inputs.compensated(weight, columns)
    if isinstance(wanted, Grid):
        grid = wanted
    else:
        straight = np.empty_like(target)
        straight[order] = target
        grid = choose_grid(straight, wanted, inputs.importance + inputs.damping)
        del straight
    steps = grid.steps(len(target))[order]
    pivots = np.diagonal(factor)
    errors = np.empty_like(target)
    rounded = np.empty(target.shape, np.int8)
    for start in range(0, len(target), _ROWS_AT_ONCE):
        here = slice(start, start + _ROWS_AT_ONCE)
        feedback = factor[: here.stop, here] / pivots[here]
        corrected = target[here] + feedback[:start].T @ errors[:start]
        _feed_back(corrected, feedback[start:], target[here], steps[here], grid.limits, errors[here], rounded[here])
    if descent:
        descend(target, rounded, steps, grid.limits, inputs.hessian)
    integers[order, columns] = rounded
    return grid


def _feed_back(
    wanted: Floats,
    feedback: Floats,
    target: Floats,
    steps: Floats,
    limits: tuple[int, int],
    errors: Floats,
    rounded: NDArray[np.int8],
) -> None:
    """Round rows one after another; `feedback`, `[rows, rows]`, carries their errors to later rows."""
    for start in range(0, len(wanted), _ROWS_IN_CACHE):
        stop = min(start + _ROWS_IN_CACHE, len(wanted))
        for row in range(start, stop):
            corrected = wanted[row]
            corrected += feedback[start:row, row] @ errors[start:row]
            corrected /= steps[row]
            rounded[row] = round_within(corrected, limits, out=corrected)
            corrected *= steps[row]
            np.subtract(target[row], corrected, out=errors[row])
        wanted[stop:] += feedback[start:stop, stop:].T @ errors[start:stop]


def _rounded(weight: Floats, grid: Grid) -> Floats:
    scaled = weight / grid.steps(len(weight))
    return round_within(scaled, grid.limits, out=scaled)
