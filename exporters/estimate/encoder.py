"""Graphs of a vision encoder of random weights, from its sizes alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from msgspec import structs

from edgekv.spec import EncoderSpec, PictureSpec, by_inputs
from exporters.graphs.encoder import QdqEncoder
from exporters.graphs.weights import ShardWriter
from exporters.quantize.encoder import encoder_encodings, encoder_results
from exporters.quantize.reference import Floats
from quant import Range, quantize_per_channel

_REACH = 8.0
_SLICE_LAYERS = 2


def encoder_slices(spec: EncoderSpec) -> list[tuple[EncoderSpec, int]]:
    """Encoders of few layers, and how often the time of each counts in that of all: their difference is that of layers.

    The mergers behind layers are in each.
    """
    if spec.window:
        return _window_slices(spec)
    least = max(len(spec.deepstack), _SLICE_LAYERS)
    least += (spec.layers - least) % _SLICE_LAYERS
    if spec.layers <= least + _SLICE_LAYERS:
        return [(spec, 1)]
    times = (spec.layers - least) // _SLICE_LAYERS
    few, more = (
        structs.replace(spec, layers=layers, deepstack=tuple(range(len(spec.deepstack))), wide=())
        for layers in (least, least + _SLICE_LAYERS)
    )
    return [(more, times), (few, 1 - times)]


def _window_slices(spec: EncoderSpec) -> list[tuple[EncoderSpec, int]]:
    """The same where layers are of two kinds: with attention within windows, and of all patches."""
    full = len({*spec.full_layers} & {*range(spec.layers)})
    kinds = spec.layers - full, full
    least = [min(count, _SLICE_LAYERS + count % _SLICE_LAYERS) for count in kinds]
    times = [(count - few) // _SLICE_LAYERS for count, few in zip(kinds, least, strict=True)]
    if not any(times):
        return [(spec, 1)]
    slices = [(_of_kinds(spec, *least), 1 - sum(times))]
    for kind, count in enumerate(times):
        more = [few + _SLICE_LAYERS * (at == kind) for at, few in enumerate(least)]
        slices += [(_of_kinds(spec, *more), count)] if count else []
    return slices


def _of_kinds(spec: EncoderSpec, windowed: int, full: int) -> EncoderSpec:
    """The encoder with so many layers of each kind."""
    return structs.replace(spec, layers=windowed + full, full_layers=tuple(range(windowed, windowed + full)), wide=())


def write_random_encoder(spec: EncoderSpec, pictures: PictureSpec, file: Path) -> None:
    """Write the graph of an encoder, and its weights beside it. Nothing is calibrated: all results have one range."""
    shapes = {**spec.matrices, **spec.tensors}

    def tensor(name: str) -> Floats:
        random = np.random.default_rng([5, *name.encode()])
        shape = shapes.get(name, (spec.hidden,))  # a bias of all heads together
        weights: Floats = random.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
        return weights

    matrices = {name: quantize_per_channel(by_inputs(tensor(name))) for name in spec.matrices}
    results = encoder_results(spec)
    sources = {source for result in results.values() for source in result.sources}
    encodings = encoder_encodings(spec, pictures, dict.fromkeys(sources, Range(-_REACH, _REACH)))
    store = ShardWriter(tensor, lambda _: spec.head_dim, matrices)
    graph = QdqEncoder(spec, encodings, store)
    outputs = graph.build()
    store.write(file.parent / "weights-vision.safetensors")
    onnx.save(graph.finish(outputs), file)
