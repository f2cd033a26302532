"""The error of every layer of a bundle's vision encoder against its float32 reference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper

from edgekv.bundle import Bundle, BundleWeights, VisionRecord
from edgekv.graphs.encoder import encoder_exit, encoder_layer, layer_rows
from edgekv.graphs.onnx_session import PROVIDERS, session_options
from edgekv.pictures import EncoderInputs, encoder_inputs, graph_inputs
from edgekv.spec import LAYER_ROWS_PORT, ROWS_PORT
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.rotate import ResidualRotation
from exporters.checkpoint.vision import RotatedEncoder, VisionEncoder, WideEncoder
from exporters.graphs.parts import stored_graph
from exporters.inspect.report import EncoderLayerLoss, EncoderMatrix, Levels
from exporters.quantize.encoder import EncoderTensors, NumpyEncoder
from exporters.quantize.pictures import drawn_picture
from exporters.quantize.reference import Floats, Observer
from quant import DTYPES

_PICTURE = 99
"""A drawn one that no export is calibrated on."""
_ENTRY, _ROWS, _LAYER_ROWS = "vision.entry", "vision.rows", "vision.layer_rows"
_PORTS = {_ROWS: ROWS_PORT, _LAYER_ROWS: LAYER_ROWS_PORT}
_INTEGERS = "_q"  # behind the name of a result in a graph
_LEAST = 1e-30


def measure_encoder(bundle: Bundle, checkpoint: Checkpoint) -> list[EncoderLayerLoss]:
    """Run a drawn picture through a bundle's encoder and the reference; empty if the bundle reads text alone.

    Levels are of rows: the residual behind the patches and behind each layer, the rows that decoders read, and what
    their layers read of these.

    Args:
        bundle: the bundle.
        checkpoint: that it was made of.
    """
    record, vision = bundle.manifest.vision, checkpoint.vision
    if record is None or vision is None:
        return []
    vision = vision.with_sizes(record.pictures.sizes)
    base: VisionEncoder | RotatedEncoder = vision
    name = bundle.manifest.recipe.rotation
    if name != "none":
        base = RotatedEncoder(vision, ResidualRotation(checkpoint.spec, checkpoint.tensor, name).writing)
    spec = record.encoder
    tensors: EncoderTensors = WideEncoder(base, spec.wide) if spec.wide else base
    shown = encoder_inputs(drawn_picture(_PICTURE, spec.image), spec, record.pictures)
    expected = dict[str, Floats]()
    watched = [_ENTRY, *(f"vision.layers.{layer}.fc2_add" for layer in range(spec.layers)), _ROWS]

    def observe(name: str, values: Floats) -> None:
        if name in watched:
            expected[name] = values

    ops = _MeasuringEncoder(tensors, BundleWeights(bundle.path, record.weights), observe)
    residual, worst = ops.enter(shown), [ops.worst()]
    for layer in range(spec.layers):
        residual = encoder_layer(ops, spec, layer, residual)
        worst.append(ops.worst())
    rows = encoder_exit(ops, spec, residual)
    worst.append(ops.worst())
    if spec.layer_rows is not None:
        watched.append(_LAYER_ROWS)
        layer_rows(ops, spec, rows)
        worst.append(ops.worst())
    actual = _results(bundle, record, shown, watched)
    places = ["patches", *map(str, range(spec.layers)), "rows", "inputs of layers"][: len(watched)]
    return [
        EncoderLayerLoss(place=place, rows=_levels(expected[name], actual[name]), worst=matrix)
        for place, name, matrix in zip(places, watched, worst, strict=True)
    ]


class _MeasuringEncoder(NumpyEncoder):
    """Compares each product with that of the bundle's matrix; one layer's weights are in memory."""

    def __init__(self, tensors: EncoderTensors, weights: BundleWeights, observe: Observer) -> None:
        super().__init__(tensors, observe)
        self._signal: defaultdict[str, float] = defaultdict(float)
        self._noise: defaultdict[str, float] = defaultdict(float)
        self._stored = lru_cache(maxsize=4)(lambda name: weights.matrix(name).dequantize().T)

    def product(self, x: Floats, weight: str, rows: slice, gain: float) -> Floats:
        exact = super().product(x, weight, rows, gain)
        rounded: Floats = x @ self._stored(weight)[rows].T  # its scales have the gain
        whole = weight.replace("_low.weight", ".weight")  # of 16 bits: what is rounded is the lower part
        self._signal[whole] += float(np.square(exact, dtype=np.float64).sum())
        self._noise[whole] += float(np.square(rounded - exact, dtype=np.float64).sum())
        return exact

    def worst(self) -> EncoderMatrix:
        """The matrix with the largest error since the last call; frees the weights."""
        ratios = {name: 10 * np.log10(self._signal[name] / max(self._noise[name], _LEAST)) for name in self._signal}
        name = min(ratios, key=lambda matrix: ratios[matrix])
        self._signal.clear()
        self._noise.clear()
        self.drop()
        return EncoderMatrix(name=name, own_db=float(ratios[name]))


def _results(bundle: Bundle, record: VisionRecord, shown: EncoderInputs, watched: list[str]) -> Mapping[str, Floats]:
    """What the graph computes."""
    model = stored_graph(bundle.path / record.file)
    names = {name: _PORTS.get(name, name + _INTEGERS) for name in watched}
    for name, output in names.items():
        if name not in _PORTS:
            element = helper.np_dtype_to_tensor_dtype(DTYPES[record.encodings[name].dtype])
            model.graph.output.append(helper.make_tensor_value_info(output, element, None))
    options = session_options(bundle.path, None)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=PROVIDERS)
    integers = session.run([*names.values()], graph_inputs(shown, record.encoder, record.encodings))
    at = [shown.output_rows(record.encoder) if name in _PORTS else shown.slots for name in names]
    return {
        name: record.encodings[name].dequantize(rows[0, 0, places])
        for name, rows, places in zip(names, integers, at, strict=True)
    }


def _levels(expected: Floats, actual: NDArray[np.float32]) -> Levels:
    """The least and the median row; rows behind those of the picture are of padding."""
    actual = actual[: len(expected)]
    signal, noise = np.square(expected).sum(-1), np.square(actual - expected).sum(-1)
    ratios = 10 * np.log10(np.maximum(signal, _LEAST) / np.maximum(noise, _LEAST))
    return Levels(float(ratios.min()), float(np.median(ratios)))
