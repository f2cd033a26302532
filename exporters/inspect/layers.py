"""The error of every layer and tensor of a bundle against its float32 reference."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, get_args

import numpy as np

from edgekv.bundle import Bundle, BundleWeights
from edgekv.runtime import Engine
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.tensors import by_outputs
from exporters.checkpoint.tensors import Tensors
from exporters.inspect.advice import worst
from exporters.inspect.meters import MatrixMeter, ResultMeter, TokenPower, excluded_first_tokens
from exporters.inspect.probe import Probe
from exporters.inspect.report import Kind, LayerLoss, LayersReport, Levels, TensorLoss, TokenSpan
from exporters.inspect.spans import find_spans
from exporters.inspect.tally import Tally
from exporters.inspect.trace import Trace, trace_stages
from exporters.inspect.wikitext import Pages, Window
from exporters.progress import Progress, silent
from exporters.quantize.reference import Floats, NumpyOps, Observer, Weights

_LAYER = re.compile(r"^(?:model\.)?(?:layers\.|past_(?:key|value)_|[a-z_]+_state_)(\d+)")
_KINDS: dict[Kind, re.Pattern[str]] = {
    "key": re.compile("past_key_"),
    "value": re.compile("past_value_"),
    "state": re.compile(r"[a-z_]+_state_\d"),
}
_OUTLIER_SHARE = 0.25  # share of a matrix's error
_OUTLIER_RATIO = 8.0  # times the median channel's peak


def measure_layers(
    bundle: Bundle,
    engine: Engine,
    tensors: Tensors,
    windows: Sequence[Window],
    text_name: str,
    progress: Progress = silent,
    *,
    pages: Pages | None = None,
) -> LayersReport:
    """Run token windows through the bundle's graph and the reference, one layer at a time.

    Args:
        bundle: the bundle to measure.
        engine: where its graph runs.
        tensors: the checkpoint, with the transforms that the recipe folds into the weights.
        windows: tokens to run and to predict.
        text_name: name of the text in the report.
        progress: called after every layer.
        pages: those that the windows are of, for their word perplexity.

    Raises:
        BundleError: the bundle has no ONNX graphs.
        EngineError: the engine refused a layer.
    """
    probe = Probe(bundle, engine)
    matrices, encodings = MatrixMeters(bundle, probe.first), probe.encodings
    tally, losses, spans, last = Tally(), list[TensorLoss](), list[TokenSpan](), tensors.spec.layers
    tokenizer = bundle.tokenizer()
    inputs, context = [window.inputs for window in windows], bundle.manifest.context
    exact = trace_stages(tensors, inputs, context, partial(_MeasuringOps, matrices), first=probe.first)
    traces = zip(exact, probe.stages(inputs), strict=True)
    for stage in range(last + 1):
        progress("layers", stage, last + 1)
        results: dict[str, ResultMeter] = {}
        for window in windows:
            expected, actual = next(traces)
            rest = window.after(probe.first)
            for name in expected:
                if name not in results:
                    holds_roots = _kind_of(name) == "state" and encodings[name].dtype in ("u8", "s8")
                    results[name] = ResultMeter(encodings[name], probe.first, holds_roots=holds_roots)
                results[name].add(rest.inputs, expected[name], actual[name])
            if stage == last:
                tally.add(rest, expected["logits"], actual["logits"])
        losses += matrices.close()
        losses += [_result_loss(name, meter) for name, meter in results.items()]
        spans += find_spans(results, tokenizer)
    progress("layers", last + 1, last + 1)
    return LayersReport(
        evaluation=tally.evaluation(probe.engine, text_name, pages),
        layers=list(_layers(losses, last)),
        worst=worst(losses, bundle.manifest.recipe, spans),
        tensors=losses,
        spans=sorted(spans, key=lambda span: -span.cost_db),
    )


class LayerMeter:
    """The error of every layer, without what explains it: `layers` of `measure_layers` for half of the work."""

    def __init__(self, bundle: Bundle, first: int, tensors: Tensors, windows: Sequence[Window]) -> None:
        """Start before the first layer; the arguments are those of `measure_layers` and `Probe.first`."""
        self._apart = excluded_first_tokens(first)
        self._matrices, self._errors = _MatrixErrors(bundle), list[_Error]()
        inputs, context = [window.inputs for window in windows], bundle.manifest.context
        ops = partial(_MeasuringOps, self._matrices)
        self._exact = trace_stages(tensors, inputs, context, ops, first=first)
        self._last = tensors.spec.layers

    def add(self, actual: Sequence[Trace]) -> None:
        """Add what the bundle gives in the next layer, or the head, for each window."""
        powers: dict[str, TokenPower] = {}
        for results in actual:
            for name, values in next(self._exact).items():
                powers.setdefault(name, TokenPower.empty()).add(values, results[name] - values)
        self._errors += self._matrices.close()
        for name, power in powers.items():
            sqnr_db, first_db = power.sqnr_db(self._apart)
            self._errors.append(_Error(name, _kind_of(name), _layer_of(name), sqnr_db, first_db))

    @property
    def losses(self) -> list[LayerLoss]:
        """After the head: those of all layers."""
        return [*_layers(self._errors, self._last)]


class Products(Protocol):
    """What looks at each product of the float reference."""

    def add(self, key: str, weights: Weights, x: Floats, product: Floats, rows: slice, gain: float) -> None:
        """Inputs `[T, in]` and their exact product with `rows` of the matrix times `gain`."""


class TensorError(Protocol):
    """What counts of a tensor in the error of its layer; see `TensorLoss`."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> Kind: ...
    @property
    def layer(self) -> int | None: ...
    @property
    def sqnr_db(self) -> float: ...
    @property
    def first_db(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class _Error:
    name: str
    kind: Kind
    layer: int | None
    sqnr_db: float
    first_db: float | None = None


class _MatrixErrors:
    """The errors of the elements of matrices in use."""

    def __init__(self, bundle: Bundle) -> None:
        self._weights = bundle.weights()
        self._errors: dict[str, _Error] = {}

    def add(self, key: str, weights: Weights, x: Floats, product: Floats, rows: slice, gain: float) -> None:
        if key not in self._errors:
            meter = MatrixMeter(*_compared(self._weights, key, weights, gain))
            self._errors[key] = _Error(key, "weight", _layer_of(key), meter.weights_db)

    def close(self) -> list[_Error]:
        """Return the errors and drop them."""
        errors = [*self._errors.values()]
        self._errors.clear()
        return errors


class MatrixMeters:
    """Meters of the matrices in use; `close` reads and drops them."""

    def __init__(self, bundle: Bundle, first: int) -> None:
        """Start with no matrix; `first` is the first position that is measured."""
        self._first = first
        self._weights = bundle.weights()
        self._dtypes = {weight.tensor: weight.dtype for weight in bundle.manifest.recipe.weights}
        self._meters: dict[str, MatrixMeter] = {}

    def add(self, key: str, weights: Weights, x: Floats, product: Floats, rows: slice, gain: float) -> None:
        """Record inputs `[T, in]` and their exact product with `rows` of the matrix times `gain`."""
        if key not in self._meters:
            self._meters[key] = MatrixMeter(
                *_compared(self._weights, key, weights, gain), apart=excluded_first_tokens(self._first)
            )
        self._meters[key].add(x[self._first :], product[self._first :], rows)

    def close(self) -> list[TensorLoss]:
        """Return the losses and drop the matrices."""
        for meter in self._meters.values():
            meter.close()
        losses = [self._loss(key, meter) for key, meter in self._meters.items()]
        self._meters.clear()
        return losses

    def _loss(self, key: str, meter: MatrixMeter) -> TensorLoss:
        channel, share = meter.outlier
        return TensorLoss(
            name=key,
            kind="weight",
            layer=_layer_of(key),
            dtype=self._dtypes[key],
            sqnr_db=meter.weights_db,
            own_db=meter.output_db,
            outlier=channel if share > _OUTLIER_SHARE else None,
        )


def _compared(stored: BundleWeights, key: str, weights: Weights, gain: float) -> tuple[Floats, Floats]:
    """A matrix `[out, in]` times its gain, and the bundle's, which has the gain in it."""
    return weights[key] * np.float32(gain), by_outputs(stored.matrix(key).dequantize())


class _MeasuringOps(NumpyOps):
    """The float reference; its products are looked at."""

    def __init__(
        self,
        products: Products,
        spec: DecoderSpec,
        weights: Weights,
        tokens: int,
        context: int,
        observe: Observer | None = None,
    ) -> None:
        super().__init__(spec, weights, tokens, context, observe)
        self._products = products

    def product(self, x: Floats, weight: str, rows: slice, gain: float) -> Floats:
        product = super().product(x, weight, rows, gain)
        self._products.add(weight, self._weights, x, product, rows, gain)
        return product


def _result_loss(name: str, meter: ResultMeter) -> TensorLoss:
    outlier = meter.outlier
    sqnr_db, first_db = meter.sqnr_db
    return TensorLoss(
        name=name,
        kind=_kind_of(name),
        layer=_layer_of(name),
        dtype=meter.encoding.dtype,
        sqnr_db=sqnr_db,
        own_db=meter.own_db,
        first_db=first_db,
        outlier=outlier[0] if outlier is not None and outlier[1] > _OUTLIER_RATIO else None,
        clipped=meter.clipped,
        range=meter.range,
    )


def _kind_of(name: str) -> Kind:
    for kind, start in _KINDS.items():
        if start.match(name):
            return kind
    return "activation"


def _layer_of(name: str) -> int | None:
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def _layers(losses: Sequence[TensorError], layers: int) -> Iterator[LayerLoss]:
    places: dict[str, list[TensorError]] = {"embedding": [], **{str(layer): [] for layer in range(layers)}, "head": []}
    for loss in losses:
        other = "embedding" if loss.name == "embedding" else "head"
        places[other if loss.layer is None else str(loss.layer)].append(loss)
    for place, members in places.items():
        levels = {}
        for kind in get_args(Kind):
            if levels_db := [loss.sqnr_db for loss in members if loss.kind == kind]:
                levels[kind] = _level(levels_db)
        first = [loss.first_db for loss in members if loss.kind == "activation" and loss.first_db is not None]
        yield LayerLoss(place=place, levels=levels, first=_level(first) if first else None)


def _level(levels_db: Sequence[float]) -> Levels:
    return Levels(min(levels_db), sum(levels_db) / len(levels_db))
