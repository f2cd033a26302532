"""Checks that the fields of a manifest are consistent."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from edgekv.bundle.files import is_plain_path
from edgekv.bundle.manifest import Manifest
from edgekv.bundle.records import SinkRecord
from edgekv.spec import Rope
from quant import DTYPES

_MOST_FREQUENCY = 1e3

Fail = Callable[[str, object, object], NoReturn]


def check_consistency(manifest: Manifest, fail: Fail) -> None:
    """Call `fail` with the name, found value and expected value of the first inconsistent field.

    The work is bounded by the length of the manifest, regardless of the sizes in it.
    """
    for name in manifest.files:
        if not is_plain_path(name):
            fail("files", repr(name), "plain paths inside the bundle")
    tensors = 2 * manifest.model.layers * manifest.model.kv_heads
    if tensors > len(manifest.encodings):
        fail("encodings", len(manifest.encodings), f"at least {tensors}, one for each tensor of the cache")
    try:
        manifest.cache_geometry.groups()
    except ValueError as error:
        fail("model", error, "sizes that can exist")
    _check_graphs(manifest, fail)
    decode = manifest.graph("decode")
    if decode is None:
        fail("graphs", f"roles {', '.join(sorted({g.role for g in manifest.graphs}))}", "a graph of role `decode`")
    elif decode.context != manifest.context:
        fail("graphs", f"a decode graph for {decode.context} tokens at most", f"one for all {manifest.context}")
    _check_encodings(manifest, fail)
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
    found = np.append(rotation.inverse_frequencies, rotation.attention_factor)
    if not ((found >= 0) & (found <= _MOST_FREQUENCY)).all() or rotation.attention_factor == 0:
        wanted = f"frequencies and a factor of 0 to {_MOST_FREQUENCY:g}"
        fail("model: rope", f"{found.min():g} to {found.max():g}", wanted)


def _check_sink(sink: SinkRecord, manifest: Manifest, fail: Fail) -> None:
    if sink.file not in manifest.files:
        fail("sink: file", repr(sink.file), "a file that `files` lists")
    narrowest = min([manifest.context, *(window for window in manifest.windows if window is not None)])
    if not 1 <= len(sink.tokens) < narrowest:
        fail("sink: tokens", len(sink.tokens), f"1 to {narrowest - 1}, below the narrowest attention window")
    if wrong := [token for token in sink.tokens if not 0 <= token < manifest.model.vocab]:
        fail("sink: tokens", wrong[0], f"0 to {manifest.model.vocab - 1}, the model's vocabulary")


def _check_encodings(manifest: Manifest, fail: Fail) -> None:
    """Check that every encoding of an input or output has the type that the graphs expect."""
    try:
        interfaces = [each for graph in manifest.graphs for each in manifest.interface.parts(graph)]
    except ValueError as error:
        fail("graphs", error, "graphs that can exist")
    for port in dict.fromkeys(port for each in interfaces for port in (*each.inputs, *each.outputs)):
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
        if not 1 <= graph.ar < graph.context <= manifest.context:
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
        if held != [*range(layers)] or empty or heads != [False] * (len(heads) - 1) + [True]:
            found = ", ".join(f"{part.first_layer}:{part.stop_layer}{' head' * part.head}" for part in graph.parts)
            fail(f"{at}: parts", found or "none", f"layers 0 to {layers}, in order, and a head at the end")
        if [part.embeds for part in graph.parts] != [manifest.embedding is None] + [False] * (len(heads) - 1):
            fail(f"{at}: embeds", [part.embeds for part in graph.parts], "the first part alone, or the host for all")
    if manifest.embedding is not None and manifest.embedding.file not in manifest.files:
        fail("embedding: file", repr(manifest.embedding.file), "a file that `files` lists")
