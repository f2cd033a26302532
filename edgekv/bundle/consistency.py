"""Checks that the fields of a manifest are consistent."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from edgekv.bundle.files import is_plain_path
from edgekv.bundle.manifest import Manifest
from edgekv.bundle.records import SinkRecord
from edgekv.bundle.vision import VisionRecord
from edgekv.bundle.weights import WeightPlaces
from edgekv.spec import (
    EMBEDDING,
    EMBEDDING_COLUMNS,
    EMBEDDING_STEPS,
    LAYER_INPUTS,
    LAYER_INPUTS_PORT,
    PIXELS_PORT,
    Rope,
    part_name,
    table_key,
    views,
)
from edgekv.spec.tensors import norms_of_residual
from quant import DTYPES

_MAX_FREQUENCY = 1e3
_WHOLE = frozenset(
    {
        "norm",
        "q_norm",
        "k_norm",
        "delta_norm",
        "delta_scale",
        "kernel_bias",
        "layer_scalar",
        "activation",
        "expert_score",
    }
)
"""Roles of tensors that are stored as one, with an encoding of their own."""

Fail = Callable[[str, object, object], NoReturn]


def check_consistency(manifest: Manifest, fail: Fail) -> None:
    """Call `fail` with the name, found value and expected value of the first inconsistent field.

    The work is bounded by the length of the manifest, regardless of the sizes in it.
    """
    for name in manifest.files:
        if not is_plain_path(name):
            fail("files", repr(name), "plain paths inside the bundle")
    if manifest.kv_dtype == "u16":
        fail("kv_dtype", manifest.kv_dtype, "u8, s8 or s16: no product of matrices reads u16")
    model = manifest.model
    tensors = sum(model.cache_tensors(layer) for layer in range(model.layers))
    if tensors > len(manifest.encodings):
        fail("encodings", len(manifest.encodings), f"at least {tensors}, one for each tensor of the cache")
    try:
        manifest.cache_geometry.groups()
    except ValueError as error:
        fail("model", error, "sizes that can exist")
    _check_graphs(manifest, fail)
    if (manifest.target is None) != (model.target is None):
        fail("target", manifest.target, "one of a drafter, and none of another model")
    shares = model.target is not None and not model.target.is_cached_apart
    if shares and {graph.ar for graph in manifest.graphs} != {1}:
        fail("graphs", "a drafter's graph of several tokens", "graphs of one token")
    decode = manifest.graph("verify" if model.bidirectional else "decode")
    if decode is None and model.bidirectional:
        fail("graphs", "none that runs a text", "a graph of role `verify`")
    elif decode is None:
        fail("graphs", f"roles {', '.join(sorted({g.role for g in manifest.graphs}))}", "a graph of role `decode`")
    elif decode.context != manifest.context:
        fail("graphs", f"a {decode.role} graph for {decode.context} tokens at most", f"one for all {manifest.context}")
    _check_encodings(manifest, fail)
    _check_weights(manifest, fail)
    if model.bidirectional and (manifest.task is None or manifest.sink is not None):
        fail("model: bidirectional", True, "a task that writes no text, and no sink")
    if (manifest.task is None) != (model.outputs is None):
        fail("task", manifest.task, "one of a head that gives no logits, and none of another")
    if (axes := model.picture_axes) and len(axes) != model.rope.width // 2:
        fail("model: picture_axes", len(axes), f"{model.rope.width // 2}, one for each pair")
    if model.picture_layers and (model.layer_inputs or model.picture_layers > model.layers):
        fail("model: picture_layers", model.picture_layers, f"at most {model.layers}, without layer_inputs")
    if (vision := manifest.vision) is None and model.picture_layers:
        fail("vision", "none", "an encoder, whose rows the first layers add")
    if vision is not None:
        _check_vision(vision, manifest, fail)
    if (sink := manifest.sink) is not None:
        _check_sink(sink, manifest, fail)
    with np.errstate(all="ignore"):
        for rope in manifest.model.ropes:
            _check_rope(rope, manifest.context, fail)


def _check_rope(rope: Rope, context: int, fail: Fail) -> None:
    """Check that the parameters give angles that can be computed."""
    try:
        rotation = rope.rotation(context)
    except (ArithmeticError, ValueError) as error:
        fail("model: rope", error, "parameters that give frequencies")
    factors = np.append(rotation.inverse_frequencies, rotation.attention_factor)
    if not ((factors >= 0) & (factors <= _MAX_FREQUENCY)).all() or rotation.attention_factor == 0:
        expected = f"frequencies and a factor of 0 to {_MAX_FREQUENCY:g}"
        fail("model: rope", f"{factors.min():g} to {factors.max():g}", expected)


def _check_sink(sink: SinkRecord, manifest: Manifest, fail: Fail) -> None:
    if sink.file not in manifest.files:
        fail("sink: file", repr(sink.file), "a file that `files` lists")
    narrowest = min([manifest.context, *(window for window in manifest.windows if window is not None)])
    if not 1 <= len(sink.tokens) < narrowest:
        fail("sink: tokens", len(sink.tokens), f"1 to {narrowest - 1}, below the narrowest attention window")
    if wrong := [token for token in sink.tokens if not 0 <= token < manifest.model.vocab]:
        fail("sink: tokens", wrong[0], f"0 to {manifest.model.vocab - 1}, the model's vocabulary")


def _check_vision(vision: VisionRecord, manifest: Manifest, fail: Fail) -> None:
    """Check that the encoder's weights have its sizes, and that its rows fit the decoder, whose host embeds."""
    spec, places = vision.encoder, vision.weights
    if vision.file not in manifest.files:
        fail("vision: file", repr(vision.file), "a file that `files` lists")
    if spec.output != manifest.model.hidden:
        fail("vision: encoder: output", spec.output, f"{manifest.model.hidden}, the model's width")
    if not manifest.host_embeds:
        fail("graphs", "embeddings looked up in graphs", "the host for all, which puts rows of pictures there")
    if vision.pictures.token_id >= manifest.model.vocab:
        fail("vision: pictures: token_id", vision.pictures.token_id, f"below {manifest.model.vocab}, the vocabulary")
    _check_picture_sizes(vision, fail)
    most = max((graph.ar for graph in manifest.graphs if graph.role == "prefill"), default=1)
    if manifest.model.whole_pictures and most < spec.rows:
        fail("graphs", f"prefill of {most} tokens at most", f"one of {spec.rows}, the rows of a picture")
    activations = manifest.interface.activations
    if len(spec.deepstack) != manifest.model.picture_layers:
        expected = f"{manifest.model.picture_layers}, the layers that add rows of pictures"
        fail("vision: encoder: deepstack", len(spec.deepstack), expected)
    model, rows = manifest.model, spec.layer_rows
    if (model.layers * model.layer_inputs) != (0 if rows is None else rows.elements):
        got, expected = "none" if rows is None else rows.elements, f"{model.layers * model.layer_inputs} elements"
        fail("vision: encoder: layer_rows", got, f"{expected}, which the model's layers read")
    for port in (PIXELS_PORT, *spec.outputs):
        if (encoding := vision.encodings.get(port)) is None or encoding.dtype != activations:
            dtype = "none" if encoding is None else encoding.dtype
            fail(f"vision: encodings: {port}", dtype, f"one of {activations}")
    if manifest.graph_format != "onnx":
        if stray := [*places.matrices, *places.tensors]:
            fail("vision: weights", stray[0], f"none beside a {manifest.graph_format} graph")
        return
    if len(places.matrices) < 6 * spec.layers:
        fail("vision: weights", len(places.matrices), f"those of {spec.layers} layers")
    matrices = {name: (place.columns, place.rows) for name, place in places.matrices.items()}
    tensors = {name: place.shape for name, place in places.tensors.items()}
    for held, shapes in ((matrices, spec.matrices), (tensors, spec.tensors)):
        for name in held.keys() | shapes.keys():
            if held.get(name) != shapes.get(name):
                fail(f"vision: weights: {name}", held.get(name, "none"), shapes.get(name, "none of this name"))
    _check_extents(places, manifest, fail)


def _check_picture_sizes(vision: VisionRecord, fail: Fail) -> None:
    """Check that every picture that is prepared for the encoder has room in its input."""
    spec, pictures, shapes = vision.encoder, vision.pictures, vision.pictures.shapes
    if shapes is None:
        if pictures.sizes or (spec.has_shapes and pictures.tiling == "none"):
            fail("vision: pictures: shapes", "none", "those of the encoder's pictures")
        return
    kinds, expected = ((struct.patch, struct.merge, struct.window, struct.windows) for struct in (shapes, spec))
    if kinds != expected:
        fail("vision: pictures: shapes", kinds, f"patch, merge, window and windows of the encoder, {expected}")
    if shapes.most > spec.rows:
        fail("vision: pictures: shapes: most", shapes.most, f"at most {spec.rows}, the rows of the encoder")
    for width, height in pictures.sizes:
        is_whole = not (width % shapes.step or height % shapes.step)
        if not is_whole or spec.rows_of(width, height) > spec.rows or shapes.windows_of(width, height) > spec.windows:
            fail("vision: pictures: sizes", f"{width} x {height}", f"whole rows, of {spec.rows} at most")


def _check_encodings(manifest: Manifest, fail: Fail) -> None:
    """Check that every encoding of an input or output has the type that the graphs expect."""
    try:
        decoder = manifest.interface
        interfaces = [interface for graph in manifest.graphs for interface in decoder.parts(graph)]
    except ValueError as error:
        fail("graphs", error, "graphs that can exist")
    for port in dict.fromkeys(port for interface in interfaces for port in (*interface.inputs, *interface.outputs)):
        if port.encoding is None:
            continue
        if (encoding := manifest.encodings.get(port.encoding)) is None:
            fail("encodings", f"none of {port.encoding}", "one for each graph input and output")
        elif (dtype := DTYPES[encoding.dtype].name) != port.dtype:
            fail(f"encodings: {port.encoding}", dtype, port.dtype)


def _check_graphs(manifest: Manifest, fail: Fail) -> None:
    names = [graph.name for graph in manifest.graphs]
    if len(set(names)) != len(names):
        fail("graphs", f"names {', '.join(names)}", "unique names")
    layers = manifest.model.layers
    parts = {part.name: part for graph in manifest.graphs for part in graph.parts}
    for graph in manifest.graphs:
        at = f"graphs: {graph.name}"
        if manifest.model.bidirectional:
            if not 1 <= graph.ar == graph.context <= manifest.context or graph.role not in ("verify", "score"):
                use = f"ar {graph.ar}, context {graph.context}, role {graph.role}"
                fail(at, use, f"ar = context <= {manifest.context} in the role `verify` or `score`: nothing is cached")
        elif not 1 <= graph.ar < graph.context <= manifest.context:
            fail(at, f"ar {graph.ar}, context {graph.context}", f"1 <= ar < context <= {manifest.context}")
        if graph.role == "decode" and graph.ar != 1:
            fail(f"{at}: ar", graph.ar, "1 in the role `decode`")
        for part in graph.parts:
            if part.file not in manifest.files:
                fail(f"{at}: file", repr(part.file), "a file that `files` lists")
            if parts[part.name] != part:
                fail(f"{at}: {part.name}", part, f"{parts[part.name]}, as in another graph")
        held = [layer for part in graph.parts for layer in part.layers]
        heads = [part.head for part in graph.parts]
        empty = any(not part.layers and not part.head for part in graph.parts)
        if held != [*manifest.model.own_layers] or empty or heads != [False] * (len(heads) - 1) + [True]:
            ranges = ", ".join(f"{part.first_layer}:{part.stop_layer}{' head' * part.head}" for part in graph.parts)
            fail(
                f"{at}: parts",
                ranges or "none",
                f"layers {manifest.model.first_layer} to {layers}, in order, and a head at the end",
            )
        if [part.embeds for part in graph.parts] != [not manifest.host_embeds] + [False] * (len(heads) - 1):
            fail(f"{at}: embeds", [part.embeds for part in graph.parts], "the first part alone, or the host for all")


def _check_weights(manifest: Manifest, fail: Fail) -> None:
    """Check that every weight of the ONNX graphs has the decoder's size, and a place of its own within a file."""
    spec, places = manifest.model, manifest.weights
    if manifest.graph_format != "onnx":
        held = {table_key(spec), EMBEDDING_STEPS, EMBEDDING_COLUMNS} if manifest.host_embeds else set[str]()
        if stray := [name for name in (*places.matrices, *places.tensors) if name not in held]:
            fail("weights", stray[0], f"none beside {manifest.graph_format} graphs but the host's table")
        if held:
            _check_table(manifest, fail)
            _check_extents(places, manifest, fail)
        return
    if len(places.matrices) + len(places.tensors) < 8 * len(spec.own_layers):
        fail("weights", len(places.matrices) + len(places.tensors), f"those of {len(spec.own_layers)} layers")
    dtypes = {weight.tensor: weight.dtype for weight in manifest.recipe.weights}
    biases = set[str]()
    read_norms = norms_of_residual(spec)
    for view in views(spec):
        at = f"weights: {view.name}"
        if (view.name == EMBEDDING and spec.shares_vocabulary) or view.is_gathered or view.role == "norm_bias":
            continue
        if view.role in _WHOLE:
            copies = spec.copies if view.name in read_norms else 0
            shape = (view.shape[0] + copies, *view.shape[1:])
            if (tensor := places.tensors.get(view.name)) is None or tensor.shape != shape:
                fail(at, "none" if tensor is None else list(tensor.shape), list(shape))
        elif view.role == "kernel":
            parts = [part_name(view.name, tap=tap) for tap in range(view.shape[-1])]
            for name in parts:
                if (tensor := places.tensors.get(name)) is None or tensor.shape != view.shape[:1]:
                    fail(f"weights: {name}", "none" if tensor is None else list(tensor.shape), [view.shape[0]])
            biases.update(parts)
        elif view.is_matrix:
            matrix, dtype = places.matrices.get(view.name), dtypes.get(view.name)
            is_table = view.name == table_key(spec)
            expected_matrix = (view.shape, "int8" if is_table else dtype, is_table)
            if matrix is None or ((matrix.columns, matrix.rows), matrix.dtype, matrix.by_outputs) != expected_matrix:
                order = " by outputs" if matrix is not None and matrix.by_outputs else ""
                got = "none" if matrix is None else f"{matrix.dtype} [{matrix.columns}, {matrix.rows}]{order}"
                kind = "int8 by outputs" if is_table else dtype or "a type that `recipe` lists"
                fail(at, got, f"{kind} {list(view.shape)}")
        else:
            is_rate = view.role == "delta_rate"
            heads = view.shape[0] if is_rate else places.matrices[view.name.removesuffix("bias") + "weight"].heads
            names = [f"{view.name}.h{head}" for head in range(heads)]
            parts = names if names[0] in places.tensors else [view.name]
            for name in parts:
                size = (view.shape[0] // len(parts),)
                if (tensor := places.tensors.get(name)) is None or tensor.shape != size:
                    fail(f"weights: {name}", "none" if tensor is None else list(tensor.shape), list(size))
            biases.update(parts)
    if spec.layer_inputs:
        _check_layer_inputs(manifest, fail)
    _check_table(manifest, fail)
    known = {view.name for view in views(spec) if not view.is_gathered} | biases | {EMBEDDING_STEPS, EMBEDDING_COLUMNS}
    known |= {LAYER_INPUTS} if spec.layer_inputs else set()
    if unknown := [name for name in (*places.matrices, *places.tensors) if name not in known]:
        fail("weights", unknown[0], "weights of the decoder")
    _check_extents(places, manifest, fail)


def _check_table(manifest: Manifest, fail: Fail) -> None:
    """Check that the table of embeddings has the decoder's vocabulary and width, and its rows the graphs' type."""
    spec, places = manifest.model, manifest.weights
    key, place = table_key(spec), places.matrices.get(table_key(spec))
    if place is None or not place.by_outputs or (place.columns, place.rows) != (spec.vocab, spec.hidden):
        got = "none" if place is None else f"{place.dtype} [{place.columns}, {place.rows}]"
        fail(f"weights: {key}", got, f"int8 by outputs {[spec.vocab, spec.hidden]}")
    steps, shape = places.tensors.get(EMBEDDING_STEPS), (spec.vocab, 1)
    if steps is None or steps.shape != shape:
        fail(f"weights: {EMBEDDING_STEPS}", "none" if steps is None else list(steps.shape), list(shape))
    columns = places.tensors.get(EMBEDDING_COLUMNS)
    if columns is not None and columns.shape != (spec.hidden,):
        fail(f"weights: {EMBEDDING_COLUMNS}", list(columns.shape), [spec.hidden])
    types = {"embedding": manifest.interface.activations} | ({} if columns is None else {"embedding.columns": "u16"})
    for name, dtype in types.items():
        if (encoding := manifest.encodings.get(name)) is None or encoding.dtype != dtype:
            fail(f"encodings: {name}", "none" if encoding is None else encoding.dtype, f"one of {dtype}")


def _check_layer_inputs(manifest: Manifest, fail: Fail) -> None:
    """Check that the table that the host gathers from has the decoder's vocabulary and layers."""
    spec, place = manifest.model, manifest.weights.matrices.get(LAYER_INPUTS)
    shape = [spec.vocab, spec.layers * spec.layer_inputs]
    if place is None or not place.by_outputs or [place.columns, place.rows] != shape:
        got = "none" if place is None else f"{place.dtype} [{place.columns}, {place.rows}]"
        fail(f"weights: {LAYER_INPUTS}", got, f"int8 by outputs {shape}")
    if (encoding := manifest.encodings.get(LAYER_INPUTS_PORT)) is None or encoding.dtype != "u16":
        fail(f"encodings: {LAYER_INPUTS_PORT}", "none" if encoding is None else encoding.dtype, "one of u16")


def _check_extents(places: WeightPlaces, manifest: Manifest, fail: Fail) -> None:
    """Check that nothing is stored outside of its file or over something else."""
    ends = dict[str, tuple[int, str]]()
    for name, file, extent in sorted(places.extents(), key=lambda place: (place[1], place[2])):
        if (record := manifest.files.get(file)) is None:
            fail(f"weights: {name}: file", repr(file), "a file that `files` lists")
        if (end := extent.offset + extent.bytes) > record.bytes:
            fail(f"weights: {name}", f"bytes {extent.offset} to {end} of {file}", f"at most its {record.bytes}")
        before, other = ends.get(file, (0, ""))
        if extent.offset < before:
            fail(f"weights: {name}", f"bytes from {extent.offset} on of {file}", f"those behind {other}, from {before}")
        ends[file] = end, name
