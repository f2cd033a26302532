"""A vision encoder in float32, its int8 matrices, and the ranges of its results on pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from edgekv.errors import CheckpointError
from edgekv.graphs.encoder import EncoderOps, encoder_entry, encoder_exit, encoder_layer
from edgekv.spec import PIXELS_PORT, ROWS_PORT, EncoderSpec, EncodingTypes, PictureSpec, Result, by_inputs
from exporters.quantize.encodings import ResultRecorder, result_encodings
from exporters.quantize.reference import Floats, NumpyBlocks, Observer
from quant import LARGEST, Encoding, QuantizedWeight, Range, quantize_per_channel


class EncoderTensors(Protocol):
    """A source of an encoder's weights."""

    @property
    def spec(self) -> EncoderSpec:
        """Its sizes."""

    def tensor(self, name: str) -> Floats:
        """A tensor under its name in `EncoderSpec`; matrices are `[out, in]`."""


class NumpyEncoder(NumpyBlocks, EncoderOps[Floats]):
    """Runs an encoder on `[patches, width]`; a weight is read when it is first used, and kept until `drop`."""

    def __init__(self, tensors: EncoderTensors, observe: Observer | None = None) -> None:
        """Args: tensors: the weights. observe: called with the name and value of every result."""
        super().__init__(self._weight, lambda _: tensors.spec.head_dim, tensors.spec.eps, observe)
        self._tensors = tensors
        self._kept: dict[str, Floats] = {}

    def plus(self, x: Floats, weight: str, name: str) -> Floats:
        return self._seen(name, x + self._weight(weight))

    def merged(self, x: Floats, rows: int) -> Floats:
        return x.reshape(len(x) // rows, -1)

    def unmerged(self, x: Floats) -> Floats:
        return x.reshape(-1, 1)

    def patches(self, x: Floats) -> Floats:
        return x[: self._tensors.spec.patches]

    def normalize_merged(self, x: Floats, name: str) -> Floats:
        return self._normalized(x, name, self._tensors.spec.projector_eps)

    def exact_gelu(self, x: Floats, name: str) -> Floats:
        return self._seen(name, np.float32(0.5) * x * (1 + _erf(x * np.float32(0.5**0.5))))

    def drop(self) -> None:
        """Free the weights that were used."""
        self._kept.clear()

    def _weight(self, name: str) -> Floats:
        if name not in self._kept:
            self._kept[name] = self._tensors.tensor(name)
        return self._kept[name]


@dataclass(frozen=True, slots=True)
class QuantizedEncoder:
    """What a graph of an encoder is written from.

    Attributes:
        matrices: int8, with a scale for each output channel.
        encodings: of results, input and output.
        rows: the float rows of the pictures, each `[rows, output]`.
        reach: the least and the greatest element of an output.
    """

    matrices: dict[str, QuantizedWeight]
    encodings: dict[str, Encoding]
    rows: list[Floats]
    reach: tuple[float, float]


def encode(
    tensors: EncoderTensors,
    pictures: Sequence[Floats],
    observe: Observer | None = None,
    done: Callable[[int], None] = lambda layers: None,
) -> list[Floats]:
    """The float rows `[rows, output]` of pictures `[patches, 3 * patch**2]`, with one layer's weights in memory."""
    ops, spec = NumpyEncoder(tensors, observe), tensors.spec
    residuals = [encoder_entry(ops, spec, each) for each in pictures]
    for layer in range(spec.layers):
        ops.drop()
        for number, each in enumerate(residuals):
            residuals[number] = encoder_layer(ops, spec, layer, each)
        done(layer + 1)
    ops.drop()
    return [encoder_exit(ops, spec, each) for each in residuals]


def quantize_encoder(
    tensors: EncoderTensors,
    prepared: PictureSpec,
    pictures: Sequence[Floats],
    activations: Literal["u16", "s16"] = "u16",
    done: Callable[[int], None] = lambda layers: None,
) -> QuantizedEncoder:
    """Quantize an encoder: w8a16, per channel, rounded to nearest; results in 16 bits.

    Args:
        tensors: the weights.
        prepared: says what values pixels have.
        pictures: to observe results on, each `[patches, 3 * patch**2]`.
        activations: integer type of results.
        done: called with the number of layers done.

    Raises:
        CheckpointError: the values overflow.
    """
    ranges: dict[str, Range] = {}

    def observe(name: str, values: Floats) -> None:
        try:
            ranges.setdefault(name, Range()).observe(values)
        except ValueError:
            found = f"values from {values.min():.3g} to {values.max():.3g}"
            fix = "The weights before it are too large: use another checkpoint."
            wanted = f"at most {LARGEST:.0e} in magnitude"
            raise CheckpointError(f"vision encoder: {name}", got=found, expected=wanted, fix=fix) from None

    rows = encode(tensors, pictures, observe, done)
    encodings = result_encodings(encoder_results(tensors.spec), ranges, EncodingTypes(activations, "s16"))
    ends = [(end - prepared.mean[at]) / prepared.deviation[at] for at in range(3) for end in (0.0, 1.0)]
    encodings[PIXELS_PORT] = (
        Encoding.symmetric(max(map(abs, ends)), "s16")
        if activations == "s16"
        else Encoding.asymmetric(min(ends), max(ends), "u16")
    )
    encodings[ROWS_PORT] = encodings["vision.rows"]
    matrices = {name: quantize_per_channel(by_inputs(tensors.tensor(name))) for name in tensors.spec.matrices}
    return QuantizedEncoder(matrices, encodings, rows, encodings[ROWS_PORT].reach)


def _erf(x: Floats) -> Floats:
    """The error function, within 2e-7: formula 7.1.26 of Abramowitz and Stegun."""
    size = np.abs(x).astype(np.float64)
    t = 1 / (1 + 0.3275911 * size)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    found: Floats = (np.sign(x) * (1 - series * np.exp(-size * size))).astype(np.float32)
    return found


class _EncoderResults(ResultRecorder, EncoderOps[str]):
    def plus(self, x: str, weight: str, name: str) -> str:
        return self._record("sum", name)

    def merged(self, x: str, rows: int) -> str:
        return x

    def unmerged(self, x: str) -> str:
        return x

    def patches(self, x: str) -> str:
        return x

    def normalize_merged(self, x: str, name: str) -> str:
        return self._record("norm", name)

    def exact_gelu(self, x: str, name: str) -> str:
        return self._record("gelu", name)


def encoder_results(spec: EncoderSpec) -> dict[str, Result]:
    """Every result of an encoder that has an encoding, by name."""
    ops = _EncoderResults()
    residual = encoder_entry(ops, spec, PIXELS_PORT)
    for layer in range(spec.layers):
        residual = encoder_layer(ops, spec, layer, residual)
    encoder_exit(ops, spec, residual)
    return ops.results
