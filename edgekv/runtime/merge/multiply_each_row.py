"""Products of several rows with integers, each with the bits that `DynamicQuantizeMatMul` gives for it alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgekv.runtime.merge.fusing import Fuser, shape_of

_LEAST_STEP = 1e-30  # of a row of zeros


def round_each_row(fuser: Fuser, before: ir.Node, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Rows `[..., AR, K]` of uint8, and their steps and zero points `[AR, 1]`, float and int32.

    The range of a row is that of its elements and 0, as `DynamicQuantizeLinear` takes it for a tensor.
    """
    *first, count, _ = shape = shape_of(x)
    axis, by_row = len(first), (*first, count, 1)
    along = fuser.integers([-1])
    none, most, least = (_number(fuser, each) for each in (0, 255, _LEAST_STEP))
    low = fuser.one(before, "Min", [fuser.one(before, "ReduceMin", [x, along], by_row), none], by_row)
    high = fuser.one(before, "Max", [fuser.one(before, "ReduceMax", [x, along], by_row), none], by_row)
    span = fuser.one(before, "Sub", [high, low], by_row)
    steps = fuser.one(before, "Max", [fuser.one(before, "Div", [span, most], by_row), least], by_row)
    below = fuser.one(before, "Neg", [fuser.one(before, "Div", [low, steps], by_row)], by_row)
    zeros = fuser.one(before, "Round", [fuser.one(before, "Clip", [below, none, most], by_row)], by_row)
    flat_steps, flat_zeros = (fuser.reshape(before, each, (count,)) for each in (steps, zeros))
    bytes_of_zeros = _cast(fuser, before, flat_zeros, ir.DataType.UINT8)
    rows = fuser.one(before, "QuantizeLinear", [x, flat_steps, bytes_of_zeros], shape, axis=axis)
    rows.type = ir.TensorType(ir.DataType.UINT8)
    columns = [fuser.reshape(before, each, (count, 1)) for each in (steps, zeros)]
    return rows, columns[0], _cast(fuser, before, columns[1], ir.DataType.INT32)


def multiply_each_row(
    fuser: Fuser,
    node: ir.Node,
    rounded: tuple[ir.Value, ...],
    constants: tuple[ir.Value, ir.Value],
    sums: NDArray[np.int32],
) -> ir.Value:
    """The product of rounded rows.

    Args:
        fuser: writes nodes.
        node: the product to replace.
        rounded: what `round_each_row` returns.
        constants: int8 weights `[K, N]` and the steps of their columns.
        sums: of the integers of each column.
    """
    rows, steps, zeros = rounded
    weights, column_steps = constants
    shape = shape_of(node.outputs[0])
    columns, count = shape[-1], shape[-2]
    of_columns = fuser.constant(f"{weights.name}.sums", sums)
    product = fuser.one(node, "MatMulInteger", [rows, weights], shape)
    product.type = ir.TensorType(ir.DataType.INT32)
    surplus = fuser.one(node, "Mul", [zeros, of_columns], (count, columns))
    surplus.type = ir.TensorType(ir.DataType.INT32)
    exact = fuser.one(node, "Sub", [product, surplus], shape)
    exact.type = ir.TensorType(ir.DataType.INT32)
    both = fuser.one(node, "Mul", [steps, column_steps], (count, columns))
    return fuser.one(node, "Mul", [_cast(fuser, node, exact, ir.DataType.FLOAT), both], shape)


def _number(fuser: Fuser, value: float) -> ir.Value:
    return fuser.constant(f"float_{value:g}", np.array(value, np.float32))


def _cast(fuser: Fuser, before: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    attributes: dict[str, Any] = {"to": int(dtype)}
    found = fuser.one(before, "Cast", [value], shape_of(value), **attributes)
    found.type = ir.TensorType(dtype)
    return found
