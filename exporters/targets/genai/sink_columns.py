"""A pass: the sink as constants in front of the past, for a cache that starts empty."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgekv.bundle import Manifest
from edgekv.kv import KvTensor, Sink
from edgekv.runtime.rewrite import NodeWriter, find_port, follow, readers, unlike

_TO_THE_END = np.iinfo(np.int64).max


class SinkColumns(ir.passes.InPlacePass):
    """Puts the keys and values of the sink in place of the past's first columns, whatever these hold.

    A right-aligned cache leaves these columns empty until the context is full. The graph then computes the integers
    that it has computed with the sink in its cache.
    """

    def __init__(self, manifest: Manifest, sink: Sink) -> None:
        """Args: manifest: of the bundle, whose graphs have keys in columns by now. sink: its rows."""
        super().__init__()
        self._manifest = manifest
        self._sink = sink

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Raises: BundleError: the graph does not concatenate past and new rows as edgekv's graphs do."""
        for tensor in self._manifest.geometry.names():
            self._put(model.graph, tensor)
        return ir.passes.PassResult(model, True)

    def _put(self, graph: ir.Graph, tensor: KvTensor) -> None:
        # past -> Dequantize -> Concat
        past = find_port(graph.inputs, tensor.past)
        if past is None or len(found := readers(past)) != 1:
            raise unlike(graph, f"{tensor.past}, which one node reads")
        join = follow(found[0], "Concat")[-1]
        rows, axis = self._sink.rows[tensor.past], 2
        if tensor.kind == "key":
            rows, axis = rows.T, 3
        encoding = self._manifest.encodings[tensor.past]
        writer = NodeWriter(graph)
        first = writer.constant(f"{tensor.past}_sink_q", np.ascontiguousarray(rows)[None, None])
        bounds = [("sink_tokens", len(self._sink.tokens)), ("to_the_end", _TO_THE_END), (f"axis_{axis}", axis)]
        slices = [writer.constant(name, np.array([value], np.int64)) for name, value in bounds]
        rest = writer.node("Slice", [found[0].outputs[0], *slices], f"{tensor.past}_rest_f")
        parts = [
            writer.dequantize(first, f"{tensor.past}_sink", encoding),
            writer.requantize(rest, f"{tensor.past}_rest", encoding),
            *[each for each in join.inputs if each is not None and each is not found[0].outputs[0]],
        ]
        joined = writer.node("Concat", parts, f"{tensor.past}_joined_f", axis=axis)
        join.outputs[0].replace_all_uses_with(joined)
        graph.insert_before(join, writer.nodes)
        graph.remove(join, safe=True)
