"""A vision encoder in float32, its int8 matrices, and the ranges of its results on pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import CheckpointError
from edgekv.graphs.encoder import (
    EncoderOps,
    Residual,
    deepstack_rows,
    encoded,
    encoder_entry,
    encoder_exit,
    encoder_layer,
    layer_rows,
)
from edgekv.pictures import EncoderInputs
from edgekv.spec import (
    COS_PORT,
    LAYER_ROWS_PORT,
    PADDING_PORT,
    PIXELS_PORT,
    PLACES_PORT,
    ROWS_PORT,
    SIN_PORT,
    EncoderSpec,
    EncodingTypes,
    PictureSpec,
    Result,
    by_inputs,
    deepstack_port,
    low_of,
    mask_depth,
    mask_encoding,
    rotary_encoding,
)
from exporters.quantize.encodings import ResultRecorder, result_encodings
from exporters.quantize.reference import Floats, NumpyBlocks, Observer
from quant import LARGEST, Encoding, LayerInputs, Method, QuantizedWeight, Range, quantize, quantize_per_channel


class EncoderTensors(Protocol):
    """A source of an encoder's weights."""

    @property
    def spec(self) -> EncoderSpec:
        """Its sizes."""

    def tensor(self, name: str) -> Floats:
        """A tensor under its name in `EncoderSpec`; matrices are `[out, in]`."""


class NumpyEncoder(NumpyBlocks, EncoderOps[Floats]):
    """Runs an encoder on `[patches, width]`; a weight is read when it is first used, and kept until `drop`.

    Attributes:
        shown: the picture whose turn it is.
    """

    shown: EncoderInputs

    def __init__(self, tensors: EncoderTensors, observe: Observer | None = None) -> None:
        """Args: tensors: the weights. observe: called with the name and value of every result."""
        super().__init__(self._weight, lambda _: tensors.spec.head_dim, tensors.spec.eps, observe)
        self._tensors = tensors
        self._kept: dict[str, Floats] = {}
        self._bounds = {bound.name: (bound.low, bound.high) for bound in tensors.spec.bounds}

    def _seen(self, name: str, value: Floats) -> Floats:
        if (ends := self._bounds.get(name.partition(".h")[0])) is not None:
            value = np.clip(value, *ends).astype(np.float32)
        return super()._seen(name, value)

    def bounded(self, x: Floats, name: str) -> Floats:
        return x  # by `_seen`

    def plus(self, x: Floats, weight: str, name: str) -> Floats:
        return self._seen(name, x + self._weight(weight))

    def merged(self, x: Floats, rows: int) -> Floats:
        return x.reshape(len(x) // rows, -1)

    def averaged(self, x: Floats, rows: int, name: str) -> Floats:
        return self._seen(name, x.reshape(len(x) // rows, rows, -1).mean(1))

    def unmerged(self, x: Floats) -> Floats:
        return x.reshape(-1, 1)

    def places(self) -> Floats:
        assert self.shown.places is not None, "an encoder with shapes"
        return self.shown.places

    def turns(self) -> tuple[Floats, Floats]:
        assert self.shown.turns is not None, "an encoder with a rotary embedding"
        return self.shown.turns

    def unpadded(self, scores: Floats, name: str, *, in_windows: bool = False) -> Floats:
        return scores

    def in_windows(self, x: Floats) -> list[Floats]:
        return [x[patches] for patches in self._windows()]

    def from_windows(self, parts: list[Floats]) -> Floats:
        return np.concatenate(parts)[np.argsort(np.concatenate(self._windows()))]

    def _windows(self) -> list[NDArray[np.int64]]:
        """The patches of each window."""
        spec = self._tensors.spec
        of_patches = self.shown.slots // (spec.window**2 * spec.merged)
        return [np.flatnonzero(of_patches == window) for window in np.unique(of_patches)]

    def rms_norm(self, x: Floats, weight: str, name: str) -> Floats:
        variance = np.square(x).mean(-1, keepdims=True)
        return self._seen(name, x / np.sqrt(variance + np.float32(self._eps)) * self._weight(weight))

    def rms_norm_parts(self, x: Floats, weight: str, parts: int, eps: float, name: str) -> Floats:
        split = x.reshape(len(x), parts, -1)
        split = split / np.sqrt(np.square(split).mean(-1, keepdims=True) + np.float32(eps)) * self._weight(weight)
        return self._seen(name, split.reshape(x.shape))

    def patches(self, x: Floats) -> Floats:
        return x[: self._tensors.spec.patches] if self._tensors.spec.has_class else x

    def normalize_merged(self, x: Floats, name: str) -> Floats:
        return self._normalized(x, name, self._tensors.spec.projector_eps)

    def enter(self, shown: EncoderInputs) -> Residual[Floats]:
        """The residual before the first layer."""
        self.shown = shown
        return encoder_entry(self, self._tensors.spec, shown.patches)

    def drop(self) -> None:
        """Free the weights that were used."""
        self._kept.clear()

    def _weight(self, name: str) -> Floats:
        if name not in self._kept:
            self._kept[name] = self._tensors.tensor(name)
        return self._kept[name]


class FittingEncoder(NumpyEncoder):
    """Also rounds each matrix on its inputs, before its weights are freed: with 8 bits the exact ones stand for both.

    Matrices of 16 bits stay: what is left of one is in a second one, of the one rounded to nearest.

    Attributes:
        matrices: those that were rounded, by name.
    """

    def __init__(self, tensors: EncoderTensors, observe: Observer | None, method: Method) -> None:
        """Args: tensors: the weights. observe: see `NumpyEncoder`. method: of rounding; not `nearest`."""
        super().__init__(tensors, observe)
        self.matrices: dict[str, QuantizedWeight] = {}
        self._method = method
        self._inputs: defaultdict[str, list[Floats]] = defaultdict(list)
        self._wide = {name for high in tensors.spec.wide for name in (high, low_of(high))}

    def product(self, x: Floats, weight: str, rows: slice, gain: float) -> Floats:
        if weight not in self._wide and not rows.start:  # heads have the same inputs
            self._inputs[weight].append(x)
        return super().product(x, weight, rows, gain)

    def drop(self) -> None:
        shared: dict[tuple[int, ...], LayerInputs] = {}
        for name, pictures in self._inputs.items():
            at = tuple(map(id, pictures))
            if at not in shared:
                rows = np.concatenate(pictures)
                shared[at] = LayerInputs(rows, rows)
            self.matrices[name] = quantize(by_inputs(self._weight(name)), "int8", self._method, shared[at])
        self._inputs.clear()
        super().drop()


@dataclass(frozen=True, slots=True)
class QuantizedEncoder:
    """What a graph of an encoder is written from.

    Attributes:
        matrices: int8, with a scale for each output channel.
        encodings: of results, input and output.
        rows: the float rows of the pictures, as `encode` gives them.
        reach: the least and the greatest element of a row that is embedded.
        behind: the same of those that layers of the decoder read; 0 without.
    """

    matrices: dict[str, QuantizedWeight]
    encodings: dict[str, Encoding]
    rows: list[Floats]
    reach: tuple[float, float]
    behind: tuple[float, float]


def encode(
    ops: NumpyEncoder,
    spec: EncoderSpec,
    pictures: Sequence[EncoderInputs],
    done: Callable[[int], None] = lambda layers: None,
) -> list[Floats]:
    """The float rows `[rows, output]` of pictures, with one layer's weights in memory.

    Beside them, `[rows, output + ...]`, is what layers of the decoder read of each, or add behind them.
    """
    residuals = [ops.enter(picture) for picture in pictures]
    behind: list[list[Floats]] = [[] for _ in pictures]
    for layer in range(spec.layers):
        ops.drop()
        for number, picture in enumerate(pictures):
            ops.shown = picture
            residuals[number] = encoder_layer(ops, spec, layer, residuals[number])
            if layer in spec.deepstack:
                behind[number].append(deepstack_rows(ops, spec, spec.deepstack.index(layer), residuals[number]))
        done(layer + 1)
    ops.drop()
    rows = [encoder_exit(ops, spec, residual) for residual in residuals]
    if spec.layer_rows is not None:
        behind = [[layer_rows(ops, spec, embedded)] for embedded in rows]
    ops.drop()
    return [np.concatenate([first, *more], axis=1) for first, more in zip(rows, behind, strict=True)]


def quantize_encoder(
    tensors: EncoderTensors,
    prepared: PictureSpec,
    pictures: Sequence[EncoderInputs],
    activations: Literal["u16", "s16"] = "u16",
    method: Method = "nearest",
    done: Callable[[int], None] = lambda layers: None,
) -> QuantizedEncoder:
    """Quantize an encoder: w8a16, per channel; results in 16 bits.

    Args:
        tensors: the weights.
        prepared: says what values pixels have.
        pictures: to observe results on.
        activations: integer type of results.
        method: of rounding, on the inputs that these pictures give.
        done: called with the number of layers done.

    Raises:
        CheckpointError: the values overflow.
    """
    ranges: dict[str, Range] = {}

    def observe(name: str, values: Floats) -> None:
        try:
            ranges.setdefault(name, Range()).observe(values)
        except ValueError:
            got = f"values from {values.min():.3g} to {values.max():.3g}"
            fix = "The weights before it are too large: use another checkpoint."
            expected = f"at most {LARGEST:.0e} in magnitude"
            raise CheckpointError(f"vision encoder: {name}", got=got, expected=expected, fix=fix) from None

    ops = NumpyEncoder(tensors, observe) if method == "nearest" else FittingEncoder(tensors, observe, method)
    rows = encode(ops, tensors.spec, pictures, done)
    encodings = encoder_encodings(tensors.spec, prepared, ranges, activations)
    reaches = [(0.0, 0.0), *(encodings[port].reach for port in tensors.spec.outputs if port != ROWS_PORT)]
    matrices = dict(ops.matrices) if isinstance(ops, FittingEncoder) else {}
    for name in tensors.spec.matrices.keys() - matrices.keys():
        matrices[name] = quantize_per_channel(by_inputs(tensors.tensor(name)))
    behind = min(low for low, _ in reaches), max(high for _, high in reaches)
    return QuantizedEncoder(matrices, encodings, rows, encodings[ROWS_PORT].reach, behind)


def encoder_encodings(
    spec: EncoderSpec, prepared: PictureSpec, ranges: Mapping[str, Range], activations: Literal["u16", "s16"] = "u16"
) -> dict[str, Encoding]:
    """The encodings of an encoder's results, inputs and outputs, of the ranges of its results."""
    results, types = encoder_results(spec), EncodingTypes(activations, "s16")
    masked = [result for result in results.values() if result.kind == "masked"]
    depth = mask_depth(ranges[source] for result in masked for source in result.sources)
    encodings = result_encodings(results, ranges, types, depth)
    for name, encoding in encodings.items():  # what is beyond bounds is rounded to them
        if (bound := spec.bound_of(name)) is not None:
            low, high = encoding.reach
            encodings[name] = Encoding.asymmetric(max(low, bound.low), min(high, bound.high), "u16")
    ends = [(end - prepared.mean[at]) / prepared.deviation[at] for at in range(3) for end in (0.0, 1.0)]
    encodings[PIXELS_PORT] = (
        Encoding.symmetric(max(map(abs, ends)), "s16")
        if activations == "s16"
        else Encoding.asymmetric(min(ends), max(ends), "u16")
    )
    if spec.has_shapes:
        encodings[PADDING_PORT] = mask_encoding(depth, types)
    if spec.has_table:
        encodings[PLACES_PORT] = (
            Encoding.symmetric(1.0, "s16") if activations == "s16" else Encoding.asymmetric(0.0, 1.0, "u16")
        )
    if spec.rotary_theta is not None:
        encodings |= dict.fromkeys((COS_PORT, SIN_PORT), rotary_encoding(1.0, types))
    encodings[ROWS_PORT] = encodings["vision.rows"]
    encodings |= {
        deepstack_port(number): encodings[f"vision.deepstack.{number}.rows"] for number in range(len(spec.deepstack))
    }
    if spec.layer_rows is not None:
        encodings[LAYER_ROWS_PORT] = encodings["vision.layer_rows"]
    return encodings


class _EncoderResults(ResultRecorder, EncoderOps[str]):
    def bounded(self, x: str, name: str) -> str:
        return x

    def places(self) -> str:
        return PLACES_PORT

    def turns(self) -> tuple[str, str]:
        return COS_PORT, SIN_PORT

    def unpadded(self, scores: str, name: str, *, in_windows: bool = False) -> str:
        return self._record("masked", name, (scores,))

    def in_windows(self, x: str) -> list[str]:
        return [x]

    def from_windows(self, parts: list[str]) -> str:
        return parts[0]

    def rms_norm(self, x: str, weight: str, name: str, *, gain: float = 1.0) -> str:
        return self._record("norm", name)

    def rms_norm_parts(self, x: str, weight: str, parts: int, eps: float, name: str) -> str:
        return self._record("norm", name)

    def plus(self, x: str, weight: str, name: str) -> str:
        return self._record("sum", name)

    def merged(self, x: str, rows: int) -> str:
        return x

    def averaged(self, x: str, rows: int, name: str) -> str:
        return self._record("sum", name)

    def unmerged(self, x: str) -> str:
        return x

    def patches(self, x: str) -> str:
        return x

    def normalize_merged(self, x: str, name: str) -> str:
        return self._record("norm", name)


def encoder_results(spec: EncoderSpec) -> dict[str, Result]:
    """Every result of an encoder that has an encoding, by name."""
    ops = _EncoderResults()
    encoded(ops, spec, PIXELS_PORT)
    return ops.results
