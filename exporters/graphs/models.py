"""ONNX models in memory: read, written, and small graphs made from nothing. Weights stay in their files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from exporters.graphs.nodes import QUANTIZERS, parameter_names
from quant import DTYPES, Dtype, Encoding

_DTYPES: dict[str, Dtype] = {dtype.name: name for name, dtype in DTYPES.items()}


class NodeWriter:
    """Makes nodes and constants for a graph. An operation is named after its first result.

    Constants are added to the graph immediately. Nodes are collected in `nodes` in topological order; the caller
    inserts them into the graph.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self.nodes: list[ir.Node] = []

    def constant(self, name: str, value: NDArray[Any]) -> ir.Value:
        """The graph's initializer of this name; added with this value if there is none."""
        known = self._graph.initializers.get(name)
        if known is None:
            tensor = ir.tensor(value, name=name)
            kind = ir.TensorType(tensor.dtype)
            known = ir.Value(name=name, shape=ir.Shape(value.shape), type=kind, const_value=tensor)
            self._graph.register_initializer(known)
        return known

    def node(self, op: str, inputs: Sequence[ir.Value], output: str, **attributes: Any) -> ir.Value:
        """A node with one result."""
        result = ir.Value(name=output)
        converted = ir.convenience.convert_attributes(attributes)
        name = None if op in QUANTIZERS else f"{output}_node"
        self.nodes.append(ir.Node("", op, inputs, converted, outputs=[result], name=name))
        return result

    def quantize(self, source: ir.Value, name: str, encoding: Encoding) -> ir.Value:
        return self.node("QuantizeLinear", [source, *self._parameters(encoding)], name)

    def dequantize(self, source: ir.Value, name: str, encoding: Encoding) -> ir.Value:
        return self.node("DequantizeLinear", [source, *self._parameters(encoding)], name)

    def requantize(self, source: ir.Value, name: str, encoding: Encoding) -> ir.Value:
        """`source` as integers, `name_q`, and dequantized again, `name`."""
        return self.dequantize(self.quantize(source, f"{name}_q", encoding), name, encoding)

    def _parameters(self, encoding: Encoding) -> tuple[ir.Value, ir.Value]:
        scale, zero = parameter_names(encoding)
        return (
            self.constant(scale, np.array(encoding.scale, np.float32)),
            self.constant(zero, np.array(encoding.zero_point, DTYPES[encoding.dtype])),
        )


def load_model(path: Path) -> ir.Model:
    """Read an ONNX file; its weights stay external.

    Raises:
        Exception: not an ONNX model; what `onnx` raises has no common base.
    """
    return ir.load(path)


def save_model(model: ir.Model, path: Path) -> None:
    """Write an ONNX file. Its weights must be in the same folder."""
    ir.save(model, path)


def make_port(name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    """An input; a size given as a name is variable."""
    return declare(ir.Value(name=name), dtype, shape)


def declare(value: ir.Value, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    """Set the type and shape of an input or output; ONNX requires them."""
    value.type, value.shape = ir.TensorType(dtype), ir.Shape(shape)
    return value


def sizes(value: ir.Value) -> list[int]:
    """The static shape of an input or output."""
    assert value.shape is not None, "inputs and outputs have shapes"
    return [size for size in value.shape if isinstance(size, int)]


def number(value: ir.Value) -> NDArray[Any]:
    """The value of a constant."""
    assert value.const_value is not None, "a constant"
    return value.const_value.numpy()


def parameters(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Scale and zero point of a node that quantizes or dequantizes whole tensors; None for any other node."""
    if node.op_type not in QUANTIZERS or len(node.inputs) != 3:
        return None
    scale, zero = node.inputs[1:]
    return (scale, zero) if _is_scalar(scale) and _is_scalar(zero) else None


def _is_scalar(value: ir.Value | None) -> TypeGuard[ir.Value]:
    return value is not None and value.const_value is not None and len(value.const_value.shape) == 0


def encoding(node: ir.Node) -> Encoding | None:
    """The encoding of a node that quantizes or dequantizes whole tensors; None for any other node."""
    scale_and_zero = parameters(node)
    if scale_and_zero is None:
        return None
    scale, zero = (number(tensor) for tensor in scale_and_zero)
    return Encoding(_DTYPES[zero.dtype.name], float(scale), int(zero))


def readers(value: ir.Value) -> list[ir.Node]:
    """The nodes that read a tensor, each once."""
    return [*dict.fromkeys(use.node for use in value.uses())]
