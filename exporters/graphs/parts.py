"""Parts of graphs, built from what a bundle's manifest says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import onnx
from msgspec import structs

from edgekv.bundle import GraphRecord, Manifest, PartRecord
from edgekv.graphs.decoder import decoder_layer, drafter_input, layer_result, part_end
from edgekv.machine.graph_file import graph_content, write_graph
from edgekv.machine.system import link_or_copy
from edgekv.spec import EMBEDDINGS, DecoderSpec, KeyLayout, hidden_name
from exporters.graphs.nodes import Tensor
from exporters.graphs.qdq import AS_EXPORTED, GraphForm, QdqOps
from exporters.graphs.weights import PlacedWeights
from quant import Encoding


def build_part(
    manifest: Manifest,
    graph: GraphRecord,
    part: PartRecord,
    form: GraphForm = AS_EXPORTED,
    *,
    key_layout: KeyLayout | None = None,
) -> QdqOps:
    """A part of a graph, ready to finish; its weights stay in the bundle's files.

    The records need not be the bundle's own: a graph of the role `score` gives the logits of all rows, a part that
    does not embed reads embeddings, and a part may end at any layer.

    Args:
        manifest: of the bundle.
        graph: AR, context and role.
        part: the part to build.
        form: what the runtime wants otherwise.
        key_layout: of the keys in the cache; None for the bundle's.
    """
    spec, decoder = manifest.model, manifest.interface
    if key_layout is not None:
        decoder = replace(decoder, cache=replace(decoder.cache, key_layout=key_layout))
    encodings = with_boundaries(spec, manifest.encodings)
    ops = QdqOps(graph, part, decoder, spec, encodings, PlacedWeights(manifest.weights), form)
    return build_layers(ops, graph, part)


def with_boundaries(spec: DecoderSpec, encodings: Mapping[str, Encoding]) -> dict[str, Encoding]:
    """The encodings of a decoder, with those of the hidden state wherever it may be divided."""
    boundaries = {hidden_name(layer + 1): encodings[layer_result(spec, layer)] for layer in spec.own_layers}
    return {**encodings, EMBEDDINGS: encodings["embedding"], **boundaries}


def build_layers(ops: QdqOps, graph: GraphRecord, part: PartRecord) -> QdqOps:
    """Add the layers of a part, and what ends it."""
    hidden = drafter_input(ops, ops.spec, ops.entry)
    for layer in part.layers:
        hidden = decoder_layer(ops, ops.spec, layer, hidden)
    end_part(ops, graph, part, hidden)
    return ops


def end_part(ops: QdqOps, graph: GraphRecord, part: PartRecord, hidden: Tensor) -> None:
    """Give the logits or the hidden state of a part whose layers are built."""
    end = part_end(ops, ops.spec, graph, part, hidden)
    if part.head:
        ops.give_logits(end)
    else:
        ops.give_residual(end)


def all_rows(graph: GraphRecord) -> GraphRecord:
    """The graph with the logits of every row."""
    return structs.replace(graph, role="score")


def save_part(part: QdqOps, path: Path, weights: Path) -> None:
    """Write a part and put hard links to the files of its weights beside it.

    ONNX Runtime refuses external data outside of the graph's folder, symbolic links included. Where the file system has
    no hard links, the files are copied.

    Args:
        part: see `build_part`.
        path: the target.
        weights: the bundle's folder.
    """
    save_model_beside(part.finish(), path, weights)


def save_model_beside(model: onnx.ModelProto, path: Path, weights: Path) -> None:
    """Write a model and put hard links to the files of its weights beside it; see `save_part`."""
    for name in weight_files(model):
        if not (link := path.parent / name).exists():
            link_or_copy(weights / name, link)
    write_graph(model.SerializeToString(), path)


def stored_graph(path: Path) -> onnx.ModelProto:
    """A graph without its weights, from a file that may be compressed.

    Raises:
        BundleError: the file is damaged.
    """
    return onnx.load_from_string(graph_content(path))


def weight_files(model: onnx.ModelProto) -> list[str]:
    """The names of the files with a model's weights, sorted."""
    stored = (entry for tensor in model.graph.initializer for entry in tensor.external_data)
    return sorted({entry.value for entry in stored if entry.key == "location"})
