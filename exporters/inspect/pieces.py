"""A bundle's graph split into layers, so that only one is in memory at a time."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from edgekv.bundle import Bundle, GraphRecord, PartRecord
from edgekv.kv import KvTensor
from edgekv.spec import LOGITS, hidden_name
from edgekv.system import link_or_copy
from quant import DTYPES, Dtype, Encoding

_DTYPES: dict[str, Dtype] = {np.dtype(integer).name: name for name, integer in DTYPES.items()}
# Results without one row per token, parts of other results, and the embedding in another shape.
_OTHER = re.compile(r"\.(scores|masked)\.|^probabilities|^(key|value)_\d|\.(t|part)(\.\d+)?_q$|^embedding\.2_q$")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a graph: one layer (the first includes the embedding), or the head.

    Attributes:
        model: the part; its weights stay in the bundle's files.
        source: name of the integers `[1, 1, AR, hidden]` that it reads; None for token ids.
        result: name of the integers that the next piece reads, or `logits`.
        results: encodings of all results with one row per token, in order, including `result`.
        tensors: the cache tensors that it reads and writes.
    """

    model: onnx.ModelProto
    source: str | None
    result: str
    results: Mapping[str, Encoding]
    tensors: Sequence[KvTensor]

    def save(self, bundle: Bundle, folder: Path) -> Path:
        """Write the piece into `folder`, with hard links to its weight files."""
        for shard in _files(self.model):
            if not (link := folder / shard).exists():
                link_or_copy(bundle.path / shard, link)
        path = folder / f"{self.result}.onnx"
        onnx.save(self.model, path)
        return path


def cut(bundle: Bundle, record: GraphRecord) -> list[Piece]:
    """Split a score graph into one piece per layer, and the head."""
    manifest, geometry = bundle.manifest, bundle.manifest.geometry
    shape = [1, 1, record.ar, manifest.model.hidden]
    pieces: list[Piece] = []
    for part in record.parts:
        model = _load(bundle, part)
        constants = {each.name: each for each in model.graph.initializer}
        ends = [*map(_residual, part.layers), *([LOGITS] if part.head else [])]
        for number, end in enumerate(ends, part.first_layer):
            source = pieces[-1].result if pieces else None
            tensors = [tensor for tensor in geometry.names() if tensor.layer == number]
            nodes = _nodes_between(model.graph, source, [end, *(tensor.new for tensor in tensors)])
            results = _results(nodes, constants)
            if end == LOGITS:
                results[end] = manifest.encodings[end]
            hidden = None if source is None else _value(source, pieces[-1].results[source], shape)
            outputs = [_value(name, encoding) for name, encoding in results.items()]
            outputs += [_value(tensor.new, manifest.encodings[tensor.past]) for tensor in tensors]
            pieces.append(Piece(_piece(model, nodes, hidden, outputs), source, end, results, tensors))
    return pieces


def _residual(layer: int) -> str:
    """Name of a layer's output."""
    return f"layers.{layer}.mlp_add_q"


def _load(bundle: Bundle, part: PartRecord) -> onnx.ModelProto:
    """Load a part; its boundary tensors get the names of the results that they are."""
    model: onnx.ModelProto = onnx.load(bundle.part_path(part), load_external_data=False)
    results = {hidden_name(layer): _residual(layer - 1) for layer in (part.first_layer, part.stop_layer) if layer}
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [results.get(name, name) for name in names]
    for value in model.graph.input:
        value.name = results.get(value.name, value.name)
    return model


def _nodes_between(graph: onnx.GraphProto, source: str | None, ends: Collection[str]) -> list[onnx.NodeProto]:
    """The nodes that compute `ends` from `source` and the graph's inputs, in order."""
    wanted, found = set(ends), []
    for node in reversed(graph.node):  # topologically sorted
        if wanted.intersection(node.output) and source not in node.output:
            wanted.update(node.input)
            found.append(node)
    return found[::-1]


def _results(nodes: Sequence[onnx.NodeProto], constants: Mapping[str, onnx.TensorProto]) -> dict[str, Encoding]:
    """Encodings of the quantized results with one row per token, in order, by name."""
    found = {}
    for node in nodes:
        if node.op_type != "QuantizeLinear" or not node.output[0].endswith("_q") or _OTHER.search(node.output[0]):
            continue
        scale, zero_point = (numpy_helper.to_array(constants[name]) for name in node.input[1:])
        found[node.output[0]] = Encoding(_DTYPES[zero_point.dtype.name], float(scale), int(zero_point))
    return found


def _piece(
    model: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    added_input: onnx.ValueInfoProto | None,
    outputs: Sequence[onnx.ValueInfoProto],
) -> onnx.ModelProto:
    read = {name for node in nodes for name in node.input}
    inputs = {each.name: each for each in (added_input, *model.graph.input) if each is not None and each.name in read}
    graph = onnx.helper.make_graph(
        nodes,
        model.graph.name,
        [*inputs.values()],
        outputs,
        [each for each in model.graph.initializer if each.name in read],
    )
    piece: onnx.ModelProto = onnx.helper.make_model(
        graph, opset_imports=model.opset_import, ir_version=model.ir_version, producer_name=model.producer_name
    )
    return piece


def _value(name: str, encoding: Encoding, shape: Sequence[int] | None = None) -> onnx.ValueInfoProto:
    element = onnx.helper.np_dtype_to_tensor_dtype(DTYPES[encoding.dtype])
    value: onnx.ValueInfoProto = onnx.helper.make_tensor_value_info(name, element, shape)
    return value


def _files(model: onnx.ModelProto) -> set[str]:
    """The external weight files."""
    return {entry.value for each in model.graph.initializer for entry in each.external_data if entry.key == "location"}
