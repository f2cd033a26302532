"""The graphs of a bundle with the cache of a whole layer in one tensor, as onnxruntime-genai passes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgekv.bundle import GraphRecord, Manifest
from edgekv.errors import BundleError
from edgekv.kv import KvTensor
from quant import DTYPES, Encoding

_HEADS = 0  # axis of [kv_heads, 1, rows, width]
_TURN = [0, 1, 3, 2]
_ROW = [1, 1, 1, -1]


def past_name(kind: str, layer: int | str) -> str:
    """The graph input that stacks the heads of a layer; `%d` as the layer gives onnxruntime-genai's template."""
    return f"past_{kind}_{layer}_in"


def new_name(kind: str, layer: int | str) -> str:
    """The graph output that stacks the heads of a layer."""
    return f"past_{kind}_{layer}_out"


def stack_heads(model: onnx.ModelProto, manifest: Manifest, record: GraphRecord) -> None:
    """Give a graph one past and one new tensor for all heads of a layer, in place.

    Keys become `[kv_heads, 1, D, S-AR]` in and `[kv_heads, 1, D, AR]` out, values `[kv_heads, 1, S-AR, D]` and
    `[kv_heads, 1, AR, D]`, from one tensor a head. The integers that a head computes with stay the same. Of a
    prefill graph the input `logits_index` becomes the constant AR-1: onnxruntime-genai pads in front, so that the
    last row is the last token's.

    Args:
        model: a graph of the bundle, without its weights.
        manifest: of the bundle.
        record: what the manifest says of the graph.

    Raises:
        BundleError: the graph has not the cache that the manifest promises.
    """
    _Stacking(model.graph, manifest, record).apply()


class _Stacking:
    """Everything is dequantized, moved and quantized again: without that the HTP compiler refuses 8-bit moves."""

    def __init__(self, graph: onnx.GraphProto, manifest: Manifest, record: GraphRecord) -> None:
        self._graph = graph
        self._manifest = manifest
        self._record = record
        self._ports = manifest.interface.graph(record)
        self._before: list[onnx.NodeProto] = []
        self._after: list[onnx.NodeProto] = []
        self._constants = {tensor.name for tensor in graph.initializer}

    def apply(self) -> None:
        ports = {port.name: port for port in self._graph.input}
        layers: dict[tuple[int, str], list[KvTensor]] = {}
        for tensor in self._manifest.geometry.names():
            self._check_shape(tensor, ports.pop(tensor.past, None))
            layers.setdefault((tensor.layer, tensor.kind), []).append(tensor)
        if ports.pop("logits_index", None) is not None:
            self._constant("logits_index", np.array([self._record.ar - 1], np.int32))
        cache = {tensor.new for heads in layers.values() for tensor in heads}
        outputs = [port for port in self._graph.output if port.name not in cache]
        inputs = list(ports.values())
        for (layer, kind), heads in layers.items():
            inputs.append(self._port(past_name(kind, layer), kind, self._past_rows))
            outputs.append(self._port(new_name(kind, layer), kind, self._record.ar))
            self._split(heads, past_name(kind, layer))
            self._join(heads, new_name(kind, layer))
        self._rewrite(inputs, outputs)

    @property
    def _past_rows(self) -> int:
        return self._record.context - self._record.ar

    def _check_shape(self, tensor: KvTensor, port: onnx.ValueInfoProto | None) -> None:
        wanted = list(self._ports[tensor.past].shape)
        found = None if port is None else [dim.dim_value for dim in port.type.tensor_type.shape.dim]
        if found != wanted:
            raise BundleError(
                f"{self._record.file}: {tensor.past}",
                got=found or "no such input",
                expected=wanted,
                fix="Export the bundle again with this edgekv.",
            )

    def _in_columns(self, kind: str) -> bool:
        """Whether the bundle's graphs read `[D, rows]`, as onnxruntime-genai keeps keys."""
        return kind == "key" and self._manifest.key_layout == "columns"

    def _port(self, name: str, kind: str, rows: int) -> onnx.ValueInfoProto:
        shape = [self._manifest.model.kv_heads, *self._shape(kind, rows)]
        return helper.make_tensor_value_info(name, TensorProto.UINT8, shape)

    def _shape(self, kind: str, rows: int) -> list[int]:
        """Of one head's tensor within a stack."""
        width = self._manifest.model.head_dim
        return [1, width, rows] if kind == "key" else [1, rows, width]

    def _split(self, heads: Sequence[KvTensor], stacked: str) -> None:
        """The dequantized past of each head, under the name that the graph reads it by."""
        shared = self._encoding(heads[0])
        parts = [f"{tensor.past}_part" for tensor in heads]
        self._quantized("DequantizeLinear", stacked, stacked + "_dq", shared, self._before)
        floats = [part + "_f" for part in parts]
        self._node("Split", [stacked + "_dq"], floats, self._before, axis=_HEADS, num_outputs=len(heads))
        for tensor, part in zip(heads, parts, strict=True):
            self._pair(part, shared, self._before)
            part = self._relabelled(part, shared, self._encoding(tensor), self._before)
            part = self._turn(part, tensor, self._encoding(tensor), self._before)
            self._read_instead(tensor, part)

    def _join(self, heads: Sequence[KvTensor], stacked: str) -> None:
        shared, ar = self._encoding(heads[0]), self._record.ar
        parts = []
        for tensor in heads:
            own = self._encoding(tensor)
            part = tensor.new + "_part"
            self._quantized("DequantizeLinear", tensor.new, part, own, self._after)
            part = self._turn(part, tensor, own, self._after)
            # As one row: onnxruntime-qnn 2.7.0 multiplies a new value of 8 or 16 rows into garbage.
            parts.append(self._relabelled(part, own, shared, self._after, shape=[1, *self._shape(tensor.kind, ar)]))
        self._node("Concat", parts, [stacked + "_f"], self._after, axis=_HEADS)
        self._quantized("QuantizeLinear", stacked + "_f", stacked, shared, self._after)

    def _turn(self, name: str, tensor: KvTensor, encoding: Encoding, nodes: list[onnx.NodeProto]) -> str:
        """Keys of graphs that hold them in rows, transposed."""
        if tensor.kind == "value" or self._in_columns(tensor.kind):
            return name
        self._node("Transpose", [name], [name + "_turned_f"], nodes, perm=_TURN)
        return self._pair(name + "_turned", encoding, nodes)

    def _relabelled(
        self, name: str, old: Encoding, new: Encoding, nodes: list[onnx.NodeProto], *, shape: Sequence[int] = ()
    ) -> str:
        """The same integers under another scale: multiplied by an integer 1 whose scale is the ratio of the two.

        Each head has a scale of its own, but the tensor that stacks them can have only one. With `shape` they are
        multiplied as one row and then take that shape.
        """
        if old == new:
            return name
        if shape:
            self._node("Reshape", [name, self._constant("one_row", np.array(_ROW, np.int64))], [name + "_row_f"], nodes)
            name = self._pair(name + "_row", old, nodes)
        one = self._constant(name + "_one_q", np.array(1, np.uint8))
        self._quantized("DequantizeLinear", one, name + "_one", Encoding("u8", new.scale / old.scale, 0), nodes)
        self._node("Mul", [name, name + "_one"], [name + "_own_f"], nodes)
        name = self._pair(name + "_own", new, nodes)
        if shape:
            matrix = self._constant(f"shape_{'_'.join(map(str, shape))}", np.array(shape, np.int64))
            self._node("Reshape", [name, matrix], [name + "_matrix_f"], nodes)
            name = self._pair(name + "_matrix", new, nodes)
        return name

    def _read_instead(self, tensor: KvTensor, name: str) -> None:
        """Let what reads the dequantized past of a head read `name`."""
        (old,) = (node for node in self._graph.node if list(node.input[:1]) == [tensor.past])
        for node in self._graph.node:
            for place, read in enumerate(node.input):
                if read == old.output[0]:
                    node.input[place] = name
        self._graph.node.remove(old)

    def _rewrite(self, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]) -> None:
        graph = self._graph
        nodes = [*self._before, *graph.node, *self._after]
        for field, values in ((graph.node, nodes), (graph.input, inputs), (graph.output, outputs)):
            del field[:]
            field.extend(values)

    # ------------------------------------------------------------------ writing nodes

    def _encoding(self, tensor: KvTensor) -> Encoding:
        return self._manifest.encodings[tensor.past]

    def _pair(self, name: str, encoding: Encoding, nodes: list[onnx.NodeProto]) -> str:
        """`name`, which is `name_f` quantized and dequantized."""
        self._quantized("QuantizeLinear", name + "_f", name + "_q", encoding, nodes)
        self._quantized("DequantizeLinear", name + "_q", name, encoding, nodes)
        return name

    def _quantized(self, op: str, source: str, target: str, encoding: Encoding, nodes: list[onnx.NodeProto]) -> None:
        scale = self._constant(f"scale_{encoding.scale!r}", np.array(encoding.scale, np.float32))
        zero = np.array(encoding.zero_point, DTYPES[encoding.dtype])
        parameters = [scale, self._constant(f"zero_{encoding.dtype}_{encoding.zero_point}", zero)]
        self._node(op, [source, *parameters], [target], nodes)

    def _node(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], nodes: list[onnx.NodeProto], **attributes: Any
    ) -> None:
        nodes.append(helper.make_node(op, inputs, outputs, name=outputs[0] + "_node", **attributes))

    def _constant(self, name: str, value: np.ndarray[Any, Any]) -> str:
        if name not in self._constants:
            self._constants.add(name)
            self._graph.initializer.append(numpy_helper.from_array(value, name))
        return name
