"""A pass: products of many rows with integer matrices, as integers."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgekv.runtime.cpu_mode import RenderedMode
from edgekv.runtime.merge.fusing import CONTRIB, Fuser, Shape, made_by, replace, shape_of
from edgekv.runtime.merge.matrices import read_matrix
from edgekv.runtime.merge.multiply_each_row import multiply_each_row, round_each_row
from edgekv.runtime.merge.weight_file import WeightFile
from edgekv.runtime.rewrite import readers, remove_unused
from edgekv.spec import LORA_PREFIX

_LEAST_ROWS = 4  # with fewer, reading 4-bit weights is faster
_LARGE = 1 << 23  # weights: their product takes as long with two rows as with one
_BITS = 8
_MIDDLE = 128  # zero point of uint8

_STEPS = (1 / 127, 1 / 127 / 254)  # of the largest element: the rest is at most half a step, 127 smaller ones
_Constants = tuple[ir.Value, ir.Value]
_Parts = list[tuple[ir.Value, ir.Value, ir.Value]]


class MultiplyIntegers(ir.passes.InPlacePass):
    """Replaces products of at least four rows with constant matrices by products of 8-bit integers; needs shapes.

    Weights are the bundle's integers times the factors of their blocks: exactly 8 bits. Activations are rounded to 8
    bits over the range of the tensor, and what that left to 8 more bits, in a product of its own. Without it a token
    with large activations would leave few bits to all others: on WikiText-2 SmolLM2-135M lost 0.05 nats a token.

    Of fewer rows, and of all rows in graphs that score texts, only 8-bit matrices are multiplied so: large ones, and
    those whose activations only 8-bit matrices read. There each row has a range of its own. Both parts are rows of one
    product, which reads the weights once. In `fast`, small matrices multiply only results of norms so, in one part.
    Prefill and decode graphs share these weights.
    """

    def __init__(self, weights: WeightFile, mode: RenderedMode, *, is_scoring: bool) -> None:
        """Prepare to multiply.

        Args:
            weights: takes the integers.
            mode: see above.
            is_scoring: whether to multiply all rows as few ones.
        """
        super().__init__()
        self._weights = weights
        self._mode = mode
        self._is_scoring = is_scoring
        self._rounded: dict[ir.Value, _Parts] = {}
        self._rows: dict[tuple[ir.Value, int], tuple[ir.Value, ...]] = {}

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
        matrix = read_matrix(node.inputs[1])
        if x is None or matrix is None:
            return False
        is_large = matrix.integers.size >= _LARGE
        if by_row and (matrix.bits != _BITS or not (is_large or self._is_shared(x))):
            return False
        integers = matrix.wide()
        if integers is None:
            return False
        name = f"{node.outputs[0].name}.wide"
        weights = self._weights.constant(f"{name}.integers", integers)
        steps = self._weights.constant(f"{name}.steps", matrix.steps)
        for constant in (weights, steps):
            fuser.graph.register_initializer(constant)
        if by_row:
            sums = integers.sum(axis=0, dtype=np.int32)
            replace(node.outputs[0], self._multiply_rows(fuser, node, x, (weights, steps), sums))
            return True
        products = [
            fuser.one(node, "MatMulIntegerToFloat", [part, weights, scale, steps, zero], shape, CONTRIB)
            for part, scale, zero in self._parts(fuser, node, x)
        ]
        replace(node.outputs[0], fuser.one(node, "Add", products, shape))
        return True

    def _is_shared(self, x: ir.Value) -> bool:
        """Whether small matrices multiply these activations in the same way in prefill and decode."""
        if self._mode == "fast" and not _is_normalized(x):
            return False
        products = (each for each in readers(x) if each.op_type == "MatMul" and not _is_adapter(each.inputs[1]))
        matrices = [read_matrix(each.inputs[1]) for each in products]
        return all(each is not None and each.bits == _BITS for each in matrices)

    def _multiply_rows(
        self, fuser: Fuser, node: ir.Node, x: ir.Value, constants: _Constants, sums: NDArray[np.int32]
    ) -> ir.Value:
        """The product of rows that have their own scales, in one part or in two, which are added."""
        weights, steps = constants
        *first, count, columns = shape = shape_of(node.outputs[0])
        parts = 1 if self._mode == "fast" and prod(shape_of(weights)) < _LARGE else 2
        if count == parts == 1:
            return fuser.one(node, "DynamicQuantizeMatMul", [x, weights, steps], shape, CONTRIB)
        if parts == 1:
            if (x, parts) not in self._rows:
                self._rows[x, parts] = round_each_row(fuser, node, x)
            return multiply_each_row(fuser, node, self._rows[x, parts], constants, sums)
        if (x, parts) not in self._rows:
            self._rows[x, parts] = _round_rows(fuser, node, x)
        integers, scales = self._rows[x, parts]
        middle = fuser.constant(f"uint8_{_MIDDLE}", np.array(_MIDDLE, np.uint8))
        one = fuser.constant("float_1", np.array(1, np.float32))
        inputs = [integers, weights, one, steps, middle]
        product = fuser.one(node, "MatMulIntegerToFloat", inputs, (*first, parts * count, columns), CONTRIB)
        if count > 1:  # one product for each row: they add as that of a single row does
            product = fuser.reshape(node, product, (*first, count, parts, columns))
        added = fuser.one(node, "MatMul", [scales, product], (*first, *[count] * (count > 1), 1, columns))
        return added if count == 1 else fuser.reshape(node, added, shape)

    def _parts(self, fuser: Fuser, before: ir.Node, x: ir.Value) -> _Parts:
        """The tensor in parts of 8 bits, each with its scale and zero point; made once for all matrices."""
        if x not in self._rounded:
            self._rounded[x] = _round(fuser, before, x)
        return self._rounded[x]


def _is_adapter(value: ir.Value | None) -> bool:
    return value is not None and value.is_graph_input() and str(value.name).startswith(LORA_PREFIX)


def _is_normalized(x: ir.Value) -> bool:
    """Whether a tensor is the result of a norm: others have outliers that leave few bits to the rest."""
    reshaped = made_by(x, "Reshape")
    norm = (x if reshaped is None or reshaped.inputs[0] is None else reshaped.inputs[0]).producer()
    return norm is not None and norm.op_type.endswith("LayerNormalization")


def _round_rows(fuser: Fuser, before: ir.Node, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Rows `[..., AR, K]` of 8 bits, each in two parts `[..., 2 AR, K]`, and their scales `[..., AR, 1, 2]`.

    The scales of a single row are `[..., 1, 2]`.
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
    constants = [fuser.constant(f"step_of_row_{at}", np.array(each, np.float32)) for at, each in enumerate(_STEPS)]
    steps = [fuser.one(before, "Mul", [largest, each], of_rows) for each in constants]
    whole = fuser.one(before, "QuantizeLinear", [x, steps[0], zero], shape, **along)
    held = fuser.one(before, "DequantizeLinear", [whole, steps[0], zero], shape, **along)
    rest = fuser.one(before, "Sub", [x, held], shape)
    small = fuser.one(before, "QuantizeLinear", [rest, steps[1], zero], shape, **along)
    if count == 1:
        rows = fuser.one(before, "Concat", [whole, small], (*first, 2, width), axis=axis)
    else:
        beside = fuser.one(before, "Concat", [whole, small], (*first, count, 2 * width), axis=axis + 1)
        rows = fuser.reshape(before, beside, (*first, 2 * count, width))
    for each in (whole, small, *(() if count == 1 else (beside,)), rows):
        each.type = ir.TensorType(ir.DataType.UINT8)
    at_row = (*[1] * axis, *[1] * (count > 1), 1, 2)
    both = fuser.constant("steps_of_rows_" + "_".join(map(str, at_row)), np.array(_STEPS, np.float32).reshape(at_row))
    if count == 1:
        return rows, fuser.one(before, "Mul", [both, largest], at_row)
    by_row = fuser.reshape(before, largest, (count, 1, 1))
    return rows, fuser.one(before, "Mul", [both, by_row], (*[1] * axis, count, 1, 2))


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
