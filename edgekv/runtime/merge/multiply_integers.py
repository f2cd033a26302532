"""A pass: products of many rows with integer matrices, as integers."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from edgekv.runtime.cpu_mode import RenderedMode
from edgekv.runtime.merge.fusing import CONTRIB, Fuser, Shape, replace, shape_of
from edgekv.runtime.merge.matrices import read_matrix
from edgekv.runtime.merge.weight_file import WeightFile
from edgekv.runtime.rewrite import readers, remove_unused

_LEAST_ROWS = 4  # with fewer, reading 4-bit weights is faster
_LARGE = 1 << 23  # weights: their product takes as long with two rows as with one
_BITS = 8
_MIDDLE = 128  # zero point of uint8

_Parts = list[tuple[ir.Value, ir.Value, ir.Value]]


class MultiplyIntegers(ir.passes.InPlacePass):
    """Replaces products of at least four rows with constant matrices by products of 8-bit integers; needs shapes.

    Weights are the bundle's integers times the factors of their blocks: exactly 8 bits. Activations are rounded to 8
    bits over the range of the tensor, and what that left to 8 more bits, in a product of its own. Without it a token
    with large activations would leave few bits to all others: on WikiText-2 SmolLM2-135M lost 0.05 nats a token.

    Of fewer rows, and of all rows in graphs that score texts, only 8-bit matrices are multiplied so: large ones, and in
    `exact16` those whose activations only 8-bit matrices read. There each row has a range of its own, and both parts
    are rows of one product, which reads the weights once. Prefill and decode graphs share these weights.
    """

    def __init__(self, weights: WeightFile, mode: RenderedMode, *, is_scoring: bool) -> None:
        """Args: weights: takes the integers. mode: see above. is_scoring: whether to multiply all rows as few ones."""
        super().__init__()
        self._weights = weights
        self._mode = mode
        self._is_scoring = is_scoring
        self._rounded: dict[ir.Value, _Parts] = {}
        self._rows: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        fuser = Fuser(model.graph, "of_integers")
        modified = [node for node in [*model.graph] if node.op_type == "MatMul" and self._multiply(fuser, node)]
        if modified:
            model.graph.opset_imports[CONTRIB] = 1
            remove_unused(model)
        return ir.passes.PassResult(model, bool(modified))

    def _multiply(self, fuser: Fuser, node: ir.Node) -> bool:
        x, shape = node.inputs[0], shape_of(node.outputs[0])
        by_row = self._is_scoring or prod(shape[:-1]) < _LEAST_ROWS
        if x is None or (by_row and not self._is_faster(node, x)):
            return False
        matrix = read_matrix(node.inputs[1])
        integers = matrix.wide() if matrix is not None else None
        if matrix is None or integers is None:
            return False
        name = f"{node.outputs[0].name}.wide"
        weights = self._weights.constant(f"{name}.integers", integers)
        steps = self._weights.constant(f"{name}.steps", matrix.steps)
        for constant in (weights, steps):
            fuser.graph.register_initializer(constant)
        if by_row:
            replace(node.outputs[0], self._multiply_rows(fuser, node, x, weights, steps))
            return True
        products = [
            fuser.one(node, "MatMulIntegerToFloat", [part, weights, scale, steps, zero], shape, CONTRIB)
            for part, scale, zero in self._parts(fuser, node, x)
        ]
        replace(node.outputs[0], fuser.one(node, "Add", products, shape))
        return True

    def _is_faster(self, node: ir.Node, x: ir.Value) -> bool:
        """Whether a product of two rows costs no more than one of `MatMulNBits` with one row."""
        matrix = read_matrix(node.inputs[1])
        if matrix is None or matrix.bits != _BITS:
            return False
        if matrix.integers.size >= _LARGE:
            return True
        others = [read_matrix(each.inputs[1]) for each in readers(x) if each.op_type == "MatMul"]
        return self._mode == "exact16" and all(each is not None and each.bits == _BITS for each in others)

    def _multiply_rows(self, fuser: Fuser, node: ir.Node, x: ir.Value, weights: ir.Value, steps: ir.Value) -> ir.Value:
        """The product of rows in two parts, which are added with their scales."""
        if x not in self._rows:
            self._rows[x] = _round_rows(fuser, node, x)
        parts, scales = self._rows[x]
        *first, count, columns = shape_of(node.outputs[0])
        middle = fuser.constant(f"uint8_{_MIDDLE}", np.array(_MIDDLE, np.uint8))
        one = fuser.constant("float_1", np.array(1, np.float32))
        inputs = [parts, weights, one, steps, middle]
        product = fuser.one(node, "MatMulIntegerToFloat", inputs, (*first, 2 * count, columns), CONTRIB)
        if count == 1:
            return fuser.one(node, "MatMul", [scales, product], (*first, 1, columns))
        by_part = fuser.reshape(node, product, (*first, 2, count, columns))
        scaled = fuser.one(node, "Mul", [by_part, scales], (*first, 2, count, columns))
        axes = fuser.integers([len(first)])
        return fuser.one(node, "ReduceSum", [scaled, axes], (*first, count, columns), keepdims=0)

    def _parts(self, fuser: Fuser, before: ir.Node, x: ir.Value) -> _Parts:
        """The tensor in parts of 8 bits, each with its scale and zero point; made once for all matrices."""
        if x not in self._rounded:
            self._rounded[x] = _round(fuser, before, x)
        return self._rounded[x]


def _round_rows(fuser: Fuser, before: ir.Node, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Rows `[..., AR, K]` as `[..., 2 AR, K]` of 8 bits, and the scales of the parts.

    Scales are `[..., 1, 2]` for one row, so that a product adds the parts; `[..., 2, AR, 1]` for several.
    """
    *first, count, width = shape = shape_of(x)
    axis = len(first)
    along: dict[str, Any] = {}
    middle = np.array(_MIDDLE, np.uint8)
    if count > 1:
        middle, along = np.full(count, _MIDDLE, np.uint8), {"axis": axis}
    of_rows = middle.shape
    zero = fuser.constant(f"uint8_{_MIDDLE}" + (f"_{count}" if along else ""), middle)
    magnitude = fuser.one(before, "Abs", [x], shape)
    axes = fuser.integers([each for each in range(axis + 2) if each != axis or count == 1])
    largest = fuser.one(before, "ReduceMax", [magnitude, axes], of_rows, keepdims=0)
    factors = (1 / 127, 1 / 127 / 254)  # the rest is at most half a step: 127 smaller ones
    constants = [fuser.constant(f"step_of_row_{at}", np.array(each, np.float32)) for at, each in enumerate(factors)]
    steps = [fuser.one(before, "Mul", [largest, each], of_rows) for each in constants]
    integers = fuser.one(before, "QuantizeLinear", [x, steps[0], zero], shape, **along)
    held = fuser.one(before, "DequantizeLinear", [integers, steps[0], zero], shape, **along)
    rest = fuser.one(before, "Sub", [x, held], shape)
    smaller = fuser.one(before, "QuantizeLinear", [rest, steps[1], zero], shape, **along)
    parts = fuser.one(before, "Concat", [integers, smaller], (*first, 2 * count, width), axis=axis)
    for each in (integers, smaller, parts):
        each.type = ir.TensorType(ir.DataType.UINT8)
    at_row = (*[1] * len(first), 1, 2) if count == 1 else (*[1] * len(first), 2, 1, 1)
    both = fuser.constant("steps_of_rows_" + "_".join(map(str, at_row)), np.array(factors, np.float32).reshape(at_row))
    by_row = largest if count == 1 else fuser.reshape(before, largest, (count, 1))
    return parts, fuser.one(before, "Mul", [both, by_row], at_row if count == 1 else (*at_row[:-2], count, 1))


def _round(fuser: Fuser, before: ir.Node, x: ir.Value) -> _Parts:
    shape = shape_of(x)
    shapes: list[Shape] = [shape, (), ()]
    integers, scale, zero = fuser.insert(before, "DynamicQuantizeLinear", [x], shapes)
    held = fuser.one(before, "DequantizeLinear", [integers, scale, zero], shape)
    rest = fuser.one(before, "Sub", [x, held], shape)
    # The rest is at most half a step: 127 smaller ones.
    smaller = fuser.one(before, "Mul", [scale, fuser.constant("step_of_rest", np.array(1 / 254, np.float32))], ())
    middle = fuser.constant(f"uint8_{_MIDDLE}", np.array(_MIDDLE, np.uint8))
    rounded = fuser.one(before, "QuantizeLinear", [rest, smaller, middle], shape)
    for each in (integers, zero, rounded):
        each.type = ir.TensorType(ir.DataType.UINT8)
    return [(integers, scale, zero), (rounded, smaller, middle)]
