"""The static ONNX graphs of a bundle, built layer by layer over one weight store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from edgekv.bundle import GraphFormat, WeightPlaces
from edgekv.graphs.decoder import decoder_layer, drafter_input
from edgekv.machine.graph_file import GRAPH_SUFFIX, write_graph
from edgekv.spec import (
    EMBEDDINGS,
    FINAL_NORM,
    LAYER_INPUTS_PORT,
    DecoderInterface,
    DecoderSpec,
    GraphRecord,
    PartRecord,
    Role,
    head_width,
)
from exporters.checkpoint.tensors import Tensors
from exporters.graphs.parts import end_part
from exporters.graphs.qdq import QdqOps
from exporters.graphs.split import Split
from exporters.graphs.weights import PlacedWeights, ShardWriter, StoredWeights
from exporters.quantize.matrices import QuantizedMatrices
from exporters.quantize.table import LayerTable, Table
from quant import Encoding, Range

TFLITE_FILE = "graphs.tflite"

EMBEDDING_SHARD, VOCABULARY_SHARD = "weights-embedding", "weights-vocabulary"
_HEAD_SHARD, _NORM_SHARD, _LAYER_SHARD = "weights-head", "weights-norm", "weights-layer-inputs"
_ASKED_CONTEXT = 64


def plan_graphs(
    ar: Sequence[int],
    contexts: Sequence[int],
    split: Split,
    graph_format: GraphFormat = "onnx",
    *,
    verify: Sequence[int] = (),
    is_cached: bool = True,
) -> list[GraphRecord]:
    """The graphs for these ARs in each of these contexts: AR-1 decodes, a larger AR prefills; `verify` are ARs too.

    Without a cache there is one for each context, whose AR it is. The largest AR in the largest context also scores.
    Each part of an ONNX graph is a file; TFLite graphs are signatures of one file. Graphs share equal parts: all
    graphs use one separate head that reads one row.
    """
    if is_cached:
        steps = {context: [*sorted({*ar})] for context in sorted({*contexts})}
        graphs = [*_plan(steps, sorted(set(verify)), split)]
    else:
        graphs = [*_plan({context: [] for context in sorted({*contexts})}, None, split)]
    if graph_format == "tflite":
        (layers,) = split.layers
        return [
            GraphRecord.whole(
                g.name, TFLITE_FILE, layers=len(layers), ar=g.ar, context=g.context, role=g.role, embeds=split.embeds
            )
            for g in graphs
        ]
    return graphs


def _plan(steps: Mapping[int, list[int]], verify: list[int] | None, split: Split) -> Iterator[GraphRecord]:
    """Args: steps: ARs by context. verify: further ARs, in each; None for the context itself."""

    def record(n: int, s: int, role: Role) -> GraphRecord:
        gives_all = role in ("score", "verify")
        name = f"ar{n}_cl{s}" + (f"_{role}" if gives_all else "")
        parts = [*_parts(name, f"ar{n}_cl{s}", n if gives_all else 1, split)]
        return GraphRecord(name=name, parts=parts, ar=n, context=s, role=role)

    largest = 1
    for s, ar in steps.items():
        for n in ar:
            yield record(n, s, "decode" if n == 1 else "prefill")
        for n in [s] if verify is None else verify:
            yield record(n, s, "verify")
        largest = s if verify is None else ar[-1]
    yield record(largest, max(steps), "score")


def _parts(graph: str, shared: str, head_rows: int, split: Split) -> Iterator[PartRecord]:
    """The parts of a graph; `shared` names the parts that graphs of other roles use too."""

    def part(name: str, layers: range, *, head: bool) -> PartRecord:
        embeds = split.embeds and layers.start == 0
        first, stop = layers.start, layers.stop
        file = f"{name}{GRAPH_SUFFIX}"
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
        yield part(f"{graph}_part{len(split.layers)}" if others else graph, last, head=True)


def write_layer(tensors: Tensors, matrices: QuantizedMatrices, layer: int, folder: Path) -> WeightPlaces:
    """Write the weights that all graphs read of a layer, as a file of the bundle.

    Args:
        tensors: the weights that are not matrices.
        matrices: the integers of those of the layer, with what projects a drafter's inputs before its first layer.
        layer: its number.
        folder: the target.
    """
    writer = ShardWriter(tensors.tensor, partial(head_width, tensors.spec), matrices)
    ask_for_layer(tensors.spec, layer, writer)
    writer.write(folder / f"weights-layer-{layer:02d}.safetensors")
    return writer.places


def write_head(tensors: Tensors, matrices: QuantizedMatrices, folder: Path) -> WeightPlaces:
    """Write the weights behind the layers, as files of the bundle.

    The last norm has a file of its own if the last layer's graph gives what it results in. So has a head whose rows are
    the embeddings too.

    Args:
        tensors: the weights that are not matrices.
        matrices: the integers of the head, and of what stands in front of it.
        folder: the target.
    """
    spec = tensors.spec
    writer = ShardWriter(tensors.tensor, partial(head_width, spec), matrices)
    if spec.shares_vocabulary:
        writer.put_table(Table.of(tensors))
        writer.write(folder / f"{VOCABULARY_SHARD}.safetensors")
    if spec.gives_hidden:
        writer.tensor(FINAL_NORM)
        writer.write(folder / f"{_NORM_SHARD}.safetensors")
    ask_for_head(spec, writer)
    if writer.is_pending:
        writer.write(folder / f"{_HEAD_SHARD}.safetensors")
    return writer.places


def ask_for_layer(spec: DecoderSpec, layer: int, weights: StoredWeights) -> None:
    """Ask for all that graphs read of a layer, in the order in which they do."""
    graph = _asked_graph(layer, head=False)
    ops = _asking(spec, graph, weights)
    hidden = drafter_input(ops, spec, ops.entry) if layer == spec.first_layer else ops.entry
    decoder_layer(ops, spec, layer, hidden)


def ask_for_head(spec: DecoderSpec, weights: StoredWeights) -> None:
    """The same of what is behind the layers."""
    graph = _asked_graph(spec.layers - 1, head=True)
    ops = _asking(spec, graph, weights)
    end_part(ops, graph, graph.parts[0], ops.entry)


class _AnyEncoding(dict[str, Encoding]):
    """Of graphs of which only the weights are wanted."""

    def __missing__(self, name: str) -> Encoding:
        return Encoding("u16", 1.0, 0)


def _asked_graph(layer: int, *, head: bool) -> GraphRecord:
    """A graph of one layer."""
    part = PartRecord(name="asked", file="asked.onnx", first_layer=layer, stop_layer=layer + 1, embeds=False, head=head)
    return GraphRecord(name="asked", parts=[part], ar=1, context=_ASKED_CONTEXT, role="decode")


def _asking(spec: DecoderSpec, graph: GraphRecord, weights: StoredWeights) -> QdqOps:
    """A graph that nobody writes: it asks for its weights."""
    decoder = DecoderInterface.of(spec, _ASKED_CONTEXT, "u8", "rows", "u16")
    return QdqOps(graph, graph.parts[0], decoder, spec, _AnyEncoding(), weights)


def write_graphs(
    tensors: Tensors,
    places: WeightPlaces,
    decoder: DecoderInterface,
    encodings: Mapping[str, Encoding],
    graphs: Sequence[GraphRecord],
    folder: Path,
    progress: Callable[[int], None] | None = None,
    *,
    embedded: Range | None = None,
) -> tuple[dict[str, Encoding], WeightPlaces]:
    """Write every part of every graph, and the tables that the host reads, into `folder`.

    Parts with the same layers are built together and saved before the next ones start.

    Args:
        tensors: the exact weights, of which tables are made.
        places: of the weights of layers and head, whose files are in `folder`.
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
    spec, encodings, table = tensors.spec, dict(encodings), Table.of(tensors)
    writer = ShardWriter(tensors.tensor, partial(head_width, spec), {})
    if not spec.shares_vocabulary:
        writer.put_table(table)
        writer.write(folder / f"{EMBEDDING_SHARD}.safetensors")
    if spec.layer_inputs:
        low, high = writer.put_layer_table(LayerTable(tensors), folder / f"{_LAYER_SHARD}.safetensors")
        if embedded is not None:
            rows_low, rows_high = encodings[LAYER_INPUTS_PORT].reach
            low, high = min(low, rows_low), max(high, rows_high)
        encodings[LAYER_INPUTS_PORT] = Encoding.asymmetric(low, high, "u16")
    tables = _places_in(places, f"{VOCABULARY_SHARD}.safetensors")
    places = joined_places([tables, writer.places, places])
    encodings["embedding"] = table.encoding_with(embedded, "u16")
    if table.columns is not None:
        encodings["embedding.columns"] = table.scaled_encoding
    if any(part.entry == EMBEDDINGS for graph in graphs for part in graph.parts):
        encodings[EMBEDDINGS] = encodings["embedding"]
    stages: dict[range, dict[str, tuple[GraphRecord, PartRecord]]] = {}
    for graph in graphs:
        for part in graph.parts:
            stages.setdefault(part.layers, {})[part.name] = graph, part
    weights = PlacedWeights(places)
    for layers, parts in stages.items():
        builders = [QdqOps(graph, part, decoder, spec, encodings, weights) for graph, part in parts.values()]
        hidden = [drafter_input(ops, spec, ops.entry) for ops in builders]
        for layer in layers:
            hidden = [decoder_layer(ops, spec, layer, state) for ops, state in zip(builders, hidden, strict=True)]
            if progress is not None:
                progress(layer + 1)
        for ops, state, (graph, part) in zip(builders, hidden, parts.values(), strict=True):
            end_part(ops, graph, part, state)
            if not part.head:
                encodings[part.exit] = state.encoding  # the next part reads it
        for ops, (_, part) in zip(builders, parts.values(), strict=True):
            write_graph(ops.finish().SerializeToString(), folder / part.file)
    return encodings, places


def _places_in(places: WeightPlaces, file: str) -> WeightPlaces:
    return WeightPlaces(
        matrices={key: place for key, place in places.matrices.items() if place.file == file},
        tensors={key: place for key, place in places.tensors.items() if place.file == file},
    )


def joined_places(parts: Iterable[WeightPlaces]) -> WeightPlaces:
    """All of them, in this order."""
    joined = WeightPlaces()
    for places in parts:
        joined.matrices.update(places.matrices)
        joined.tensors.update(places.tensors)
    return joined
