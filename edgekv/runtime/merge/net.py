"""An ONNX graph as what its rewriting needs: shapes, constants, who makes a tensor and who reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import onnx

Encoding = tuple[str, str]
"""The names of a scale and of a zero point, which are one number each."""


class Net:
    """A static graph without subgraphs, its nodes in an order in which they can run.

    Attributes:
        model: what it was read from.
        nodes: in order.
        initializers: by name.
        outputs: names of the graph's outputs.
        constants: names of initializers and of what is computed from them alone.
        maker: the node that makes a tensor.
        readers: the nodes that read a tensor.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.nodes: Sequence[onnx.NodeProto] = model.graph.node
        self.initializers = {each.name: each for each in model.graph.initializer}
        self.outputs = {each.name for each in model.graph.output}
        self.maker = {name: node for node in self.nodes for name in node.output}
        self.readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        self.constants = set(self.initializers)
        for node in self.nodes:
            for name in dict.fromkeys(node.input):
                self.readers[name].append(node)
            if self.alone(node):
                self.constants.update(node.output)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors whose shapes can be inferred, by name."""
        graph = onnx.shape_inference.infer_shapes(self.model).graph
        shapes = {name: tuple(each.dims) for name, each in self.initializers.items()}
        for each in (*graph.input, *graph.value_info, *graph.output):
            sizes = each.type.tensor_type.shape.dim
            if all(size.HasField("dim_value") for size in sizes):
                shapes[each.name] = tuple(size.dim_value for size in sizes)
        return shapes

    def encoding(self, node: onnx.NodeProto) -> Encoding | None:
        """Of a `QuantizeLinear` or `DequantizeLinear` of whole tensors; None for any other node."""
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or len(node.input) != 3:
            return None
        scale, zero = node.input[1:]
        if any(name not in self.initializers or self.initializers[name].dims for name in (scale, zero)):
            return None
        return scale, zero

    def alone(self, node: onnx.NodeProto) -> bool:
        """Whether its inputs are constants."""
        return self.constants.issuperset(node.input)
