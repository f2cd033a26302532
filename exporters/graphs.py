"""The static graphs of a bundle, all built over one weight store, a layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import onnx

from edgekv.bundle import GraphFormat, GraphRecord, Role
from edgekv.kv import KeyLayout
from exporters.decoder import decoder_layer, logits
from exporters.qdq import QdqOps
from exporters.quantize import QuantizedMatrices
from exporters.reference import Tensors
from exporters.weights import WeightStore
from quant import Encoding

TFLITE_FILE = "graphs.tflite"


def plan_graphs(ar: Sequence[int], contexts: Sequence[int], graph_format: GraphFormat = "onnx") -> list[GraphRecord]:
    """The graphs for these AR numbers in each of these contexts: AR-1 decodes, a larger AR prefills.

    The largest AR in the largest context also scores. An ONNX graph has a file of its own; TFLite graphs are signatures
    of one file.
    """
    return [*_plan(sorted(set(ar)), sorted(set(contexts)), graph_format)]


def _plan(ar: list[int], contexts: list[int], graph_format: GraphFormat) -> Iterator[GraphRecord]:
    def record(n: int, s: int, role: Role, suffix: str = "") -> GraphRecord:
        name = f"ar{n}_cl{s}{suffix}"
        file = f"{name}.onnx" if graph_format == "onnx" else TFLITE_FILE
        return GraphRecord(name=name, file=file, ar=n, context=s, role=role)

    for s in contexts:
        for n in ar:
            yield record(n, s, "decode" if n == 1 else "prefill")
    yield record(ar[-1], contexts[-1], "score", "_score")


def write_graphs(
    tensors: Tensors,
    matrices: QuantizedMatrices,
    encodings: Mapping[str, Encoding],
    graphs: Sequence[GraphRecord],
    folder: Path,
    key_layout: KeyLayout = "rows",
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write every graph and the weights they share into `folder`.

    Args:
        tensors: where the other weights come from.
        matrices: the integers of every matrix.
        encodings: one for every result of the decoder and every input.
        graphs: what to write.
        folder: where to.
        key_layout: of the keys in every graph; see `edgekv.kv.Geometry`.
        progress: called with the number of layers done.
    """
    spec = tensors.spec
    store = WeightStore(tensors, matrices, folder)
    windows = spec.windows_in(max(graph.context for graph in graphs))
    builders = [QdqOps(g.ar, g.context, spec, encodings, store, key_layout, windows) for g in graphs]
    hidden = [ops.embed("model.embed_tokens.weight", "embedding") for ops in builders]
    store.flush("weights-embedding")
    for layer in range(spec.layers):
        hidden = [decoder_layer(ops, spec, layer, each) for ops, each in zip(builders, hidden, strict=True)]
        store.flush(f"weights-layer-{layer:02d}")
        if progress is not None:
            progress(layer + 1)
    ends = []
    for ops, each, graph in zip(builders, hidden, graphs, strict=True):
        rows = ops.select(each) if graph.role == "prefill" else each
        ends.append(logits(ops, spec, tensors.head_key, rows))
    store.flush("weights-head")
    for ops, end, graph in zip(builders, ends, graphs, strict=True):
        rows_out = 1 if graph.role == "prefill" else graph.ar
        onnx.save(ops.finish(end, graph.name, rows_out, spec.vocab), folder / graph.file)
