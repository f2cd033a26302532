"""A pass: the cache of a whole layer in one tensor, as onnxruntime-genai and GenieX pass it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgekv.bundle import Manifest
from edgekv.errors import BundleError
from edgekv.kv import KvTensor
from edgekv.runtime.rewrite import NodeWriter, declare, find_port, make_port, readers, sizes
from edgekv.spec import GraphRecord, PartRecord
from edgekv.spec.graph import LOGITS_INDEX
from exporters.targets.stacked_names import new_name, past_name
from quant import Encoding

_HEADS = 0  # axis of [kv_heads, 1, rows, width]
_ROW = [1, 1, 1, -1]


@dataclass(frozen=True, slots=True)
class _Head:
    """The cache of one head: the graph's input and output, and the encoding of both."""

    past: ir.Value
    new: ir.Value
    encoding: Encoding


class StackHeads(ir.passes.InPlacePass):
    """Gives a graph one past tensor and one new tensor for all heads of a layer.

    Keys become `[kv_heads, 1, D, S-AR]` in and `[kv_heads, 1, D, AR]` out, values `[kv_heads, 1, S-AR, D]` and
    `[kv_heads, 1, AR, D]`. The integers of each head stay the same. The input `logits_index` of a prefill graph, if
    it has one, becomes the constant AR-1: onnxruntime-genai pads in front, so the last row is the last token's.

    Each move is quantized again: the HTP compiler refuses to move bare 8-bit integers.
    """

    def __init__(self, manifest: Manifest, record: GraphRecord, part: PartRecord | None = None) -> None:
        """The pass for one graph of a bundle, or for one part of it.

        Args:
            manifest: of the bundle.
            record: of the graph. If the bundle's keys are in rows, `KeysInColumns` has turned them.
            part: the part; None for a graph of one.
        """
        super().__init__()
        self._manifest = manifest
        self._layers = range(manifest.model.layers) if part is None else part.layers
        self._record = record
        self._past_rows = record.context - record.ar

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Raises: BundleError: the graph's cache is not the one of the manifest."""
        graph = model.graph
        layers: dict[tuple[int, str], list[_Head]] = {}
        for tensor in self._manifest.geometry.names():
            if tensor.layer not in self._layers:
                continue
            layers.setdefault((tensor.layer, tensor.kind), []).append(self._head(graph, tensor))
        if (index := find_port(graph.inputs, LOGITS_INDEX)) is not None:
            graph.inputs.remove(index)
            last = NodeWriter(graph).constant(LOGITS_INDEX, np.array([self._record.ar - 1], np.int32))
            index.replace_all_uses_with(last)
        before, after = NodeWriter(graph), NodeWriter(graph)
        for (layer, kind), heads in layers.items():
            self._split(graph, before, heads, past_name(kind, layer), self._shape(kind, self._past_rows))
            self._join(graph, after, heads, new_name(kind, layer), self._shape(kind, self._record.ar))
        graph.insert_before(graph[0], before.nodes)
        graph.extend(after.nodes)
        return ir.passes.PassResult(model, True)

    def _head(self, graph: ir.Graph, tensor: KvTensor) -> _Head:
        past, new = find_port(graph.inputs, tensor.past), find_port(graph.outputs, tensor.new)
        wanted = [1, *self._shape(tensor.kind, self._past_rows)]
        if past is None or new is None or sizes(past) != wanted:
            raise BundleError(
                f"{self._record.file}: {tensor.past}",
                got="no such input" if past is None else sizes(past),
                expected=wanted,
                fix="Export the bundle again with this edgekv.",
            )
        return _Head(past, new, self._manifest.encodings[tensor.past])

    def _shape(self, kind: str, rows: int) -> list[int]:
        """Of one head's tensor within a stack."""
        width = self._manifest.model.head_dim
        return [1, width, rows] if kind == "key" else [1, rows, width]

    @staticmethod
    def _split(graph: ir.Graph, writer: NodeWriter, heads: Sequence[_Head], name: str, shape: Sequence[int]) -> None:
        """Let the graph read each head's past from one input."""
        shared = heads[0].encoding
        stack = make_port(name, heads[0].past.dtype or ir.DataType.UINT8, [len(heads), *shape])
        graph.inputs.append(stack)
        whole = writer.dequantize(stack, f"{name}_dq", shared)
        names = [f"{head.past.name}_part" for head in heads]
        parts = writer.multi_output(
            "Split", [whole], [f"{each}_f" for each in names], axis=_HEADS, num_outputs=len(heads)
        )
        for head, part_name, floats in zip(heads, names, parts, strict=True):
            part = _rescale(writer, writer.requantize(floats, part_name, shared), shared, head.encoding)
            (dequantize,) = readers(head.past)
            dequantize.outputs[0].replace_all_uses_with(part)
            graph.remove(dequantize, safe=True)
            graph.inputs.remove(head.past)

    @staticmethod
    def _join(graph: ir.Graph, writer: NodeWriter, heads: Sequence[_Head], name: str, shape: Sequence[int]) -> None:
        """Let the graph write all heads' new tensors into one output."""
        shared = heads[0].encoding
        parts = []
        for head in heads:
            graph.outputs.remove(head.new)
            part = writer.dequantize(head.new, f"{head.new.name}_part", head.encoding)
            # As one row: onnxruntime-qnn 2.7.0 multiplies a new value of 8 or 16 rows into garbage.
            parts.append(_rescale_as_row(writer, part, head.encoding, shared, [1, *shape]))
        joined = writer.node("Concat", parts, f"{name}_f", axis=_HEADS)
        stack = writer.quantize(joined, name, shared)
        graph.outputs.append(declare(stack, heads[0].new.dtype or ir.DataType.UINT8, [len(heads), *shape]))


def _rescale(writer: NodeWriter, value: ir.Value, old: Encoding, new: Encoding) -> ir.Value:
    """The same integers under another scale: multiplied by an integer 1 whose scale is the ratio of the two.

    Each head has its own scale, but the tensor that stacks them can have only one.
    """
    if old == new:
        return value
    one = writer.constant(f"{value.name}_one_q", np.array(1, np.uint8))
    ratio = writer.dequantize(one, f"{value.name}_one", Encoding("u8", new.scale / old.scale, 0))
    return writer.requantize(writer.node("Mul", [value, ratio], f"{value.name}_own_f"), f"{value.name}_own", new)


def _rescale_as_row(
    writer: NodeWriter, value: ir.Value, old: Encoding, new: Encoding, shape: Sequence[int]
) -> ir.Value:
    """As `_rescale`, with the multiplied tensor laid out as one row; the result has this shape."""
    if old == new:
        return value
    one_row = writer.constant("one_row", np.array(_ROW, np.int64))
    row = writer.node("Reshape", [value, one_row], f"{value.name}_row_f")
    row = _rescale(writer, writer.requantize(row, f"{value.name}_row", old), old, new)
    matrix = writer.constant(f"shape_{'_'.join(map(str, shape))}", np.array(shape, np.int64))
    return writer.requantize(writer.node("Reshape", [row, matrix], f"{row.name}_matrix_f"), f"{row.name}_matrix", new)
