"""Helpers of the passes that replace several nodes of a graph by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgekv.runtime.rewrite import named_constant

CONTRIB = "com.microsoft"

Shape = tuple[int, ...]


class Fuser:
    """Inserts nodes and constants into a graph. Replaced nodes stay until `remove_unused`."""

    def __init__(self, graph: ir.Graph, suffix: str) -> None:
        """Args: suffix: of the names of new nodes, another one in each pass."""
        self.graph = graph
        self._suffix = suffix
        self._count = 0

    def insert(
        self,
        before: ir.Node,
        op: str,
        inputs: Sequence[ir.Value | None],
        shapes: Sequence[Shape],
        domain: str = "",
        **attributes: Any,
    ) -> list[ir.Value]:
        """Insert a node before another; its results are float; the caller gives others their type."""
        self._count += 1
        name = f"{op.lower()}_{self._suffix}_{self._count}"
        node = ir.node(op, inputs, attributes, domain=domain, num_outputs=len(shapes), name=name)
        for index, (value, shape) in enumerate(zip(node.outputs, shapes, strict=True)):
            value.name = f"{name}.{index}"
            value.shape, value.type = ir.Shape(shape), ir.TensorType(ir.DataType.FLOAT)
        self.graph.insert_before(before, node)
        return [*node.outputs]

    def one(
        self,
        before: ir.Node,
        op: str,
        inputs: Sequence[ir.Value | None],
        shape: Shape,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """Insert a node with one result."""
        return self.insert(before, op, inputs, [shape], domain, **attributes)[0]

    def reshape(self, before: ir.Node, value: ir.Value, shape: Shape) -> ir.Value:
        """The same elements in another shape."""
        made = self.one(before, "Reshape", [value, self.integers(shape)], shape)
        made.type = value.type
        return made

    def integers(self, values: Sequence[int]) -> ir.Value:
        """A constant of int64."""
        return self.constant("int64_" + "_".join(map(str, values)), np.array(values, np.int64))

    def constant(self, name: str, array: NDArray[Any]) -> ir.Value:
        """The constant of this name; its name tells its value."""
        return named_constant(self.graph, name, array)


def replace(old: ir.Value | None, new: ir.Value) -> None:
    """Let all readers of a tensor read another one."""
    assert old is not None, "a result"
    old.replace_all_uses_with(new)


def shape_of(value: ir.Value | None) -> Shape:
    """The static shape of a tensor; empty if it is not known."""
    if value is None or value.shape is None or not all(isinstance(each, int) for each in value.shape):
        return ()
    return tuple(each for each in value.shape if isinstance(each, int))


def only_reader(value: ir.Value | None) -> ir.Node | None:
    """The node that reads a tensor if there is one, and only one."""
    if value is None or value.is_graph_output():
        return None
    uses = [*value.uses()]
    return uses[0].node if len(uses) == 1 else None


def made_by(value: ir.Value | None, op: str) -> ir.Node | None:
    """The node that computes a tensor, if it has this operation."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op else None


def axis_of(node: ir.Node, default: int) -> int:
    """The axis of a node, counted from the first one where the rank is known."""
    axis: int = node.attributes.get_int("axis", default)
    rank = len(shape_of(node.outputs[0]))
    return axis + rank if axis < 0 and rank else axis


def perm_of(node: ir.Node) -> tuple[int, ...]:
    """The axes of a transposition."""
    return tuple(node.attributes["perm"].as_ints())


def constant_of(value: ir.Value | None) -> NDArray[Any] | None:
    """The value of a constant."""
    return None if value is None or value.const_value is None else value.const_value.numpy()
