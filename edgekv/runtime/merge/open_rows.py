"""A pass: the number of past rows is left open, so that a step can bind those in use."""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from edgekv.runtime.binding import OPEN_ROWS
from edgekv.runtime.merge.fusing import Fuser, Shape, axis_of, perm_of, shape_of
from edgekv.spec import MASK

_PAST_AXIS, _MASK_AXIS = 2, 3
_ELEMENTWISE = ("Add", "Cast", "DequantizeLinear", "Mul", "QuantizeLinear", "Softmax", "Sub", "Tanh")

_Axes = dict[ir.Value, int]


class OpenRows(ir.passes.InPlacePass):
    """Gives the past inputs and the masks that belong to them a variable number of rows; needs shapes.

    Follows the axis of the rows from the inputs to the products that sum over it. A graph in which an operation needs
    the number of rows, or which reads keys as columns, stays as it is.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        axes: _Axes = {}
        for value in graph.inputs:
            if (axis := _input_axis(value)) is not None:
                axes[value] = axis
        if not axes or not all(_follow(node, axes) for node in graph):
            return ir.passes.PassResult(model, False)
        fuser = Fuser(graph, "of_rows")
        for node in [*graph]:
            if node.op_type == "Reshape" and node.inputs[0] in axes:
                shape = [*shape_of(node.outputs[0])]
                shape[axes[node.outputs[0]]] = -1
                node.replace_input_with(1, fuser.integers(shape))
        for value, axis in axes.items():
            if value.is_graph_input():
                rows = shape_of(value)[axis]
                value.shape = ir.Shape([*shape_of(value)[:axis], f"{OPEN_ROWS}{rows}", *shape_of(value)[axis + 1 :]])
            else:
                value.shape = None
        return ir.passes.PassResult(model, True)


def _input_axis(value: ir.Value) -> int | None:
    name = str(value.name)
    if name.startswith("past_"):
        return _PAST_AXIS
    return _MASK_AXIS if name.startswith(MASK) else None


def _follow(node: ir.Node, axes: _Axes) -> bool:
    """Note the axis of the rows in a node's result; False if the node needs their number."""
    found = [(value, axes[value]) for value in node.inputs if value is not None and value in axes]
    if not found:
        return True
    result = node.outputs[0]
    if result.is_graph_output() or not shape_of(result):
        return False
    if node.op_type == "Split" and [value for value, _ in found] == [node.inputs[0]]:
        (_, rows), along = found[0], axis_of(node, 0)
        axes.update(dict.fromkeys(node.outputs, rows))
        return along != rows
    if len(node.outputs) > 1:
        return False
    if node.op_type in ("MatMul", "FusedMatMul"):
        return _follow_product(node, axes)
    axis = _moved_axis(node, axes)
    if axis is None:
        return False
    axes[result] = axis
    return True


def _moved_axis(node: ir.Node, axes: _Axes) -> int | None:
    """The axis of the rows in the result of a node that keeps them; None if it does not."""
    first, shape = node.inputs[0], shape_of(node.outputs[0])
    if node.op_type == "Reshape":
        return _reshaped_axis(shape_of(first), axes[first], shape) if first in axes else None
    if node.op_type == "Transpose" and first in axes:
        return perm_of(node).index(axes[first])
    if node.op_type == "Concat":
        found = {None if value is None else axes.get(value) for value in node.inputs}
        own = axis_of(node, 0)
        # New rows beside past ones have a fixed number.
        return own if found <= {own, None} else next(iter(found)) if len(found) == 1 else None
    if node.op_type not in _ELEMENTWISE:
        return None
    return _broadcast_axis(node, axes, shape)


def _reshaped_axis(before: Shape, axis: int, after: Shape) -> int | None:
    """The axis after which a reshaped tensor has as many elements, if the rows can be its unknown size."""
    inner = prod(before[axis + 1 :])
    return next((at for at in range(len(after)) if prod(after[at + 1 :]) == inner and after[at] > 1), None)


def _broadcast_axis(node: ir.Node, axes: _Axes, shape: Shape) -> int | None:
    """The axis of the rows in an elementwise result, if every other tensor has one element along it."""
    from_end = {len(shape_of(value)) - axes[value] for value in node.inputs if value in axes}
    if len(from_end) != 1 or (node.op_type.endswith("Linear") and _is_scaled_along(node, axes)):
        return None
    (back,) = from_end
    others = [value for value in node.inputs if value is not None and value not in axes]
    if node.op_type.endswith("Linear"):
        others = []
    if any(len(shape_of(value)) >= back and shape_of(value)[-back] != 1 for value in others):
        return None
    return len(shape) - back


def _is_scaled_along(node: ir.Node, axes: _Axes) -> bool:
    """Whether a node that quantizes has a scale for each row."""
    source = node.inputs[0]
    return len(shape_of(node.inputs[1])) > 0 and source is not None and axis_of(node, 1) == axes.get(source)


def _follow_product(node: ir.Node, axes: _Axes) -> bool:
    """Note the axis of the rows in a product, unless the product sums over them."""
    left, right = node.inputs
    if any(node.attributes.get_int(name, 0) for name in ("transA", "transBatchA", "transBatchB")):
        return False
    turned = node.attributes.get_int("transB", 0)
    rank, result = len(shape_of(node.outputs[0])), node.outputs[0]
    at_left = axes[left] - len(shape_of(left)) if left in axes else None
    at_right = axes[right] - len(shape_of(right)) if right in axes else None
    summed = -1 if turned else -2
    if at_left == -1 or at_right == summed:
        return at_left == -1 and at_right == summed
    if at_left is None and at_right is not None and at_right >= -2:
        axes[result] = rank - 1
        return True
    return False
