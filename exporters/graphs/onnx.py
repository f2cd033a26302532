"""The static ONNX graphs of a bundle, built layer by layer over one weight store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import structs

from edgekv.bundle import GraphFormat, WeightPlaces
from edgekv.graphs.decoder import decoder_layer, drafter_input
from edgekv.machine.graph_file import write_graph
from edgekv.spec import EMBEDDINGS, LAYER_INPUTS_PORT, DecoderInterface, GraphRecord, PartRecord, Role, head_width
from exporters.checkpoint.tensors import Tensors
from exporters.graphs.parts import end_part
from exporters.graphs.qdq import QdqOps
from exporters.graphs.split import Split
from exporters.quantize.matrices import QuantizedMatrices
from exporters.quantize.table import LayerTable, Table
from exporters.quantize.weights import WeightStore
from quant import Encoding, Range

TFLITE_FILE = "graphs.tflite"

EMBEDDING_SHARD, VOCABULARY_SHARD = "weights-embedding", "weights-vocabulary"
_HEAD_SHARD, _NORM_SHARD = "weights-head", "weights-norm"


def plan_graphs(
    ar: Sequence[int],
    contexts: Sequence[int],
    split: Split,
    graph_format: GraphFormat = "onnx",
    *,
    verify: Sequence[int] = (),
) -> list[GraphRecord]:
    """The graphs for these ARs in each of these contexts: AR-1 decodes, a larger AR prefills; `verify` are ARs too.

    The largest AR in the largest context also scores. Each part of an ONNX graph is a file; TFLite graphs are
    signatures of one file. Graphs share equal parts: all graphs use one separate head that reads one row.
    """
    graphs = [*_plan(sorted(set(ar)), sorted(set(contexts)), sorted(set(verify)), split)]
    if graph_format == "tflite":
        (layers,) = split.layers
        return [
            GraphRecord.whole(
                g.name, TFLITE_FILE, layers=len(layers), ar=g.ar, context=g.context, role=g.role, embeds=split.embeds
            )
            for g in graphs
        ]
    return graphs


def _plan(ar: list[int], contexts: list[int], verify: list[int], split: Split) -> Iterator[GraphRecord]:
    def record(n: int, s: int, role: Role) -> GraphRecord:
        gives_all = role in ("score", "verify")
        name = f"ar{n}_cl{s}" + (f"_{role}" if gives_all else "")
        parts = [*_parts(name, f"ar{n}_cl{s}", n if gives_all else 1, split, role)]
        return GraphRecord(name=name, parts=parts, ar=n, context=s, role=role)

    for s in contexts:
        for n in ar:
            yield record(n, s, "decode" if n == 1 else "prefill")
        for n in verify:
            yield record(n, s, "verify")
    yield record(ar[-1], contexts[-1], "score")


def _parts(graph: str, shared: str, head_rows: int, split: Split, role: Role) -> Iterator[PartRecord]:
    """The parts of a graph; `shared` names the parts that graphs of other roles use too."""

    def part(name: str, layers: range, *, head: bool) -> PartRecord:
        embeds = split.embeds and layers.start == 0
        first, stop = layers.start, layers.stop
        file = f"{name}.onnx"
        return PartRecord(name=name, file=file, first_layer=first, stop_layer=stop, embeds=embeds, head=head)

    *others, last = split.layers
    for number, layers in enumerate(others, 1):
        yield part(f"{shared}_part{number}", layers, head=False)
    if split.own_head:
        suffix = f"_part{len(split.layers)}" if others else "_body"
        yield part(shared + suffix, last, head=False)
        name = "head" if head_rows == 1 else f"head_ar{head_rows}"
        yield part(name, range(last.stop, last.stop), head=True)
    else:
        own = part(f"{graph}_part{len(split.layers)}" if others else graph, last, head=True)
        # No device scores, so no other program reads what only that role has.
        yield structs.replace(own, file=f"{own.file}.gz") if role == "score" else own


def write_graphs(
    tensors: Tensors,
    matrices: QuantizedMatrices,
    decoder: DecoderInterface,
    encodings: Mapping[str, Encoding],
    graphs: Sequence[GraphRecord],
    folder: Path,
    progress: Callable[[int], None] | None = None,
    *,
    embedded: Range | None = None,
) -> tuple[dict[str, Encoding], WeightPlaces]:
    """Write every part of every graph, and the weights they share, into `folder`.

    Parts with the same layers are built together and saved before the next ones start.

    Args:
        tensors: the weights that are not matrices.
        matrices: the integers of every matrix.
        decoder: gives the inputs and outputs of the graphs.
        encodings: one for every result of the decoder and every input.
        graphs: the graphs to write.
        folder: the target.
        progress: called with the number of layers done.
        embedded: what other rows than the table's reach that the host puts in their place; None if there are none.

    Returns:
        The encodings, with those of the hidden states between parts and of the embeddings that the host looks up; and
        the places of all weights.
    """
    spec = tensors.spec
    store = WeightStore(tensors.tensor, partial(head_width, spec), matrices, folder)
    encodings = dict(encodings)
    table = Table.of(tensors)
    store.put_table(table)
    store.flush(VOCABULARY_SHARD if spec.shares_vocabulary else EMBEDDING_SHARD)
    if spec.layer_inputs:
        encodings[LAYER_INPUTS_PORT] = Encoding.asymmetric(*store.put_layer_table(LayerTable(tensors)), "u16")
    encodings["embedding"] = table.encoding_with(embedded, "u16")
    if table.columns is not None:
        encodings["embedding.columns"] = table.scaled_encoding
    if any(part.entry == EMBEDDINGS for graph in graphs for part in graph.parts):
        encodings[EMBEDDINGS] = encodings["embedding"]
    stages: dict[range, dict[str, tuple[GraphRecord, PartRecord]]] = {}
    for graph in graphs:
        for part in graph.parts:
            stages.setdefault(part.layers, {})[part.name] = graph, part
    for layers, parts in stages.items():
        builders = [QdqOps(graph, part, decoder, spec, encodings, store) for graph, part in parts.values()]
        hidden = [drafter_input(ops, spec, ops.entry) for ops in builders]
        for layer in layers:
            hidden = [decoder_layer(ops, spec, layer, each) for ops, each in zip(builders, hidden, strict=True)]
            store.flush(f"weights-layer-{layer:02d}")
            if progress is not None:
                progress(layer + 1)
        last_norm = False
        for ops, each, (graph, part) in zip(builders, hidden, parts.values(), strict=True):
            end_part(ops, graph, part, each)
            last_norm |= part.head or (spec.gives_hidden and part.ends(spec.layers))
            if not part.head:
                encodings[part.exit] = each.encoding  # the next part reads it
        if last_norm:
            store.flush(_HEAD_SHARD if any(part.head for _, part in parts.values()) else _NORM_SHARD)
        for ops, (_, part) in zip(builders, parts.values(), strict=True):
            write_graph(ops.finish().SerializeToString(), folder / part.file)
    return encodings, store.places
