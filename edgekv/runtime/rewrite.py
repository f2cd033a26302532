"""Rewriting ONNX graphs: helpers shared by the passes of `edgekv.runtime.merge` and of the exporters.

A rewrite is an `onnx_ir` pass: it changes a model in place and says whether it modified it. Weights stay in their
files as external data; no pass reads them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from quant import DTYPES, Dtype, Encoding

_DTYPES: dict[str, Dtype] = {dtype.name: name for name, dtype in DTYPES.items()}
_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")


class NodeWriter:
    """Makes nodes and constants for a graph. A node is named after its first result.

    Constants are added to the graph immediately. Nodes are collected in `nodes` in topological order; the caller
    inserts them into the graph.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self.nodes: list[ir.Node] = []

    def constant(self, name: str, value: NDArray[Any]) -> ir.Value:
        """The graph's initializer of this name; added with this value if there is none."""
        return named_constant(self._graph, name, value)

    def node(self, op: str, inputs: Sequence[ir.Value], output: str, **attributes: Any) -> ir.Value:
        """A node with one result."""
        return self.multi_output(op, inputs, [output], **attributes)[0]

    def multi_output(
        self, op: str, inputs: Sequence[ir.Value], outputs: Sequence[str], **attributes: Any
    ) -> list[ir.Value]:
        """A node with several results."""
        return self.with_attributes(op, inputs, outputs, ir.convenience.convert_attributes(attributes))

    def with_attributes(
        self, op: str, inputs: Sequence[ir.Value], outputs: Sequence[str], attributes: Iterable[ir.Attr]
    ) -> list[ir.Value]:
        """A node with given attributes, such as those of another node."""
        results = [ir.Value(name=name) for name in outputs]
        self.nodes.append(ir.Node("", op, inputs, attributes, outputs=results, name=f"{outputs[0]}_node"))
        return results

    def quantize(self, source: ir.Value, name: str, encoding: Encoding) -> ir.Value:
        return self.node("QuantizeLinear", [source, *self._parameters(encoding)], name)

    def dequantize(self, source: ir.Value, name: str, encoding: Encoding) -> ir.Value:
        return self.node("DequantizeLinear", [source, *self._parameters(encoding)], name)

    def requantize(self, source: ir.Value, name: str, encoding: Encoding) -> ir.Value:
        """`source` as integers, `name_q`, and dequantized again, `name`."""
        return self.dequantize(self.quantize(source, f"{name}_q", encoding), name, encoding)

    def _parameters(self, encoding: Encoding) -> tuple[ir.Value, ir.Value]:
        zero = np.array(encoding.zero_point, DTYPES[encoding.dtype])
        return (
            self.constant(f"scale_{encoding.scale!r}", np.array(encoding.scale, np.float32)),
            self.constant(f"zero_{encoding.dtype}_{encoding.zero_point}", zero),
        )


def load_model(path: Path) -> ir.Model:
    """Read an ONNX file; its weights stay external.

    Raises:
        Exception: not an ONNX model; what `onnx` raises has no common base.
    """
    return ir.load(path)


def apply(model: ir.Model, *passes: ir.passes.PassBase) -> bool:
    """Run passes in order; return whether one of them modified the model.

    `onnx_ir.passes.Sequential` does the same, but hides a pass's own error behind a PassError.
    """
    modified = [each(model).modified for each in passes]
    return any(modified)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector: it would visit the objects of a large graph many times while they are made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class InferredShapes:
    """The shapes of all tensors of an ONNX file that can be inferred."""

    def __init__(self, path: Path) -> None:
        graph = onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False)).graph
        self._constants = {each.name: each for each in graph.initializer}
        self._results = {each.name: each for each in (*graph.input, *graph.value_info, *graph.output)}

    def of(self, value: ir.Value) -> tuple[int, ...]:
        """The static shape of a tensor; empty if it is not known."""
        if (constant := self._constants.get(value.name)) is not None:
            return tuple(constant.dims)
        if (result := self._results.get(value.name)) is None:
            return ()
        dims = result.type.tensor_type.shape.dim
        return tuple(each.dim_value for each in dims) if all(each.HasField("dim_value") for each in dims) else ()


def save_model(model: ir.Model, path: Path) -> None:
    """Write an ONNX file. Its weights must be in the same folder: see `weight_files` and `link_weights`."""
    ir.save(model, path)


def remove_unused(model: ir.Model) -> None:
    """Remove the nodes and constants that no output depends on.

    `onnx_ir.passes.common.RemoveUnusedNodesPass` does the same but takes ten times as long.
    """
    graph, unused = model.graph, set[ir.Node]()
    for node in reversed(graph):
        users = [use.node for value in node.outputs for use in value.uses()]
        if unused.issuperset(users) and not any(value.is_graph_output() for value in node.outputs):
            unused.add(node)
    graph.remove(unused, safe=True)
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]


def named_constant(graph: ir.Graph, name: str, value: NDArray[Any]) -> ir.Value:
    """The graph's initializer of this name; added with this value if there is none."""
    found = graph.initializers.get(name)
    if found is None:
        found = initializer(name, value)
        graph.register_initializer(found)
    return found


def initializer(name: str, value: NDArray[Any]) -> ir.Value:
    """A constant that is not yet in a graph."""
    tensor = ir.tensor(value, name=name)
    return ir.Value(name=name, shape=ir.Shape(value.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)


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
    return [each for each in value.shape if isinstance(each, int)]


def number(value: ir.Value) -> NDArray[Any]:
    """The value of a constant."""
    assert value.const_value is not None, "a constant"
    return value.const_value.numpy()


def parameters(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Scale and zero point of a node that quantizes or dequantizes whole tensors; None for any other node."""
    if node.op_type not in _QUANTIZERS or len(node.inputs) != 3:
        return None
    scale, zero = node.inputs[1:]
    return (scale, zero) if _is_scalar(scale) and _is_scalar(zero) else None


def _is_scalar(value: ir.Value | None) -> TypeGuard[ir.Value]:
    return value is not None and value.const_value is not None and len(value.const_value.shape) == 0


def encoding(node: ir.Node) -> Encoding | None:
    """The encoding of a node that quantizes or dequantizes whole tensors; None for any other node."""
    found = parameters(node)
    if found is None:
        return None
    scale, zero = (number(each) for each in found)
    return Encoding(_DTYPES[zero.dtype.name], float(scale), int(zero))


def dtype_and_shape(value: ir.Value) -> tuple[str, ...]:
    """The type and shape of an input or constant, as a key."""
    return (str(value.dtype), str(value.shape))


def readers(value: ir.Value) -> list[ir.Node]:
    """The nodes that read a tensor, each once."""
    return [*dict.fromkeys(use.node for use in value.uses())]
