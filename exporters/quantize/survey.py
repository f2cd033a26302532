"""One pass of the exact decoder over a little text: what export decides before it quantizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.graphs.decoder import decoder_layer, logits
from edgekv.spec import EMBEDDING, HEAD, DecoderInterface, DecoderSpec, KvTensor, by_inputs
from exporters.checkpoint.aligned import value_rotation
from exporters.checkpoint.columns import blocks_of_rows
from exporters.checkpoint.head_range import HeadNumber, HeadRange
from exporters.checkpoint.tensors import Tensors
from exporters.quantize.encodings import decoder_results
from exporters.quantize.reference import NO_CHANGES, WINDOWS_AT_ONCE, Changes, Floats, NumpyOps, Observer, Weights
from quant.products import in_threads

_TINY = float(np.finfo(np.float32).tiny)
_NOT_COMPARED = frozenset({"cache", "state", "scores", "masked"})
"""Kinds whose values at a position also depend on other tokens, or that have ranges of their own."""


_OF_EXPERTS = ("gate", "sigmoid", "silu", "up", "mlp", "expert", "down")
"""Results of a mixture that each expert has one of, with one encoding for all."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """How far the first tokens exceed all others.

    Attributes:
        result: name of the result in which they do so most.
        ratio: of the greatest magnitudes, first tokens to others.
    """

    result: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Survey:
    """What the pass has seen.

    Attributes:
        outlier: how far the first n tokens exceed the others.
        rows: keys and values of the first n tokens, `[n, D]`, by layer, kind and head.
        logits: after each of the first n tokens, `[n, V]`.
        reach: of the keys and values of all other tokens, by layer and head.
    """

    outlier: Outlier
    rows: Mapping[KvTensor, Floats] = field(repr=False)
    logits: Floats = field(repr=False)
    reach: Mapping[HeadNumber, HeadRange] = field(repr=False)


def survey(
    tensors: Tensors,
    windows: NDArray[Any],
    context: int,
    first: int,
    progress: Callable[[int, int], None] = lambda done, of: None,
    changes: Changes = NO_CHANGES,
) -> Survey:
    """Run the exact decoder.

    Args:
        tensors: the weights.
        windows: token ids of a calibration text `[windows, T]`, all with the same first tokens.
        context: the context length of the rotary embedding.
        first: n, the number of first tokens.
        progress: called with the number of windows that passed a layer, of all layers, and the total.
        changes: what an adapter adds.
    """
    spec, weights = tensors.spec, Weights(tensors)
    seen = _Seen(spec, first)
    ops = _PartialOps(tensors, weights, windows.shape[1], context, seen.observe, changes)
    if spec.layer_inputs:
        weights.layer_inputs.add(windows)
    states = [ops.embed(window, "embedding") for window in windows]
    for layer in range(spec.layers):
        weights.drop()

        def computed(numbered: tuple[int, Floats], layer: int = layer) -> tuple[Floats, _SeenApart]:
            (window, state), own = numbered, _SeenApart(seen)
            return decoder_layer(ops.of_window(window, windows[window], own.observe), spec, layer, state), own

        results = in_threads(computed, [*enumerate(states)], at_once=WINDOWS_AT_ONCE)
        for window, (state, own) in enumerate(results):
            seen.take(own)
            states[window] = state
            progress(layer * len(states) + window, spec.layers * len(states))
    weights.drop()
    ops = _PartialOps(tensors, weights, max(first, 1), context)
    last = logits(ops, spec, states[0][: max(first, 1)])[:first]
    progress(spec.layers * len(states), spec.layers * len(states))
    return Survey(seen.outlier, seen.rows, last, seen.reach)


class _Seen:
    """Collects what is needed of the results of a decoder on `[T, width]`."""

    def __init__(self, spec: DecoderSpec, first: int) -> None:
        self.outlier = Outlier("embedding", 0.0)
        self.rows: dict[KvTensor, Floats] = {}
        self.reach: dict[tuple[int, int], HeadRange] = {}
        self._spec = spec
        self._first = first
        self._results = decoder_results(spec)
        mixtures = () if spec.experts is None else spec.experts.layers
        self.of_experts = {f"layers.{layer}.{name}" for layer in mixtures for name in _OF_EXPERTS}
        tensors = DecoderInterface.of(spec, spec.max_positions, "u8", "rows", "u16").tensors(range(spec.layers))
        self._cache = {tensor.past: tensor for tensor in tensors}

    def observe(self, name: str, values: Floats) -> None:
        if self.is_kept(name):
            self._keep(self._cache[name], values)
        elif (outlier := self.compared(name, values)).ratio > self.outlier.ratio:
            self.outlier = outlier

    def is_kept(self, name: str) -> bool:
        """Whether a result is keys, values or a state."""
        return self._results[name].kind in ("cache", "state") and not self._results[name].by_chunk

    def compared(self, name: str, values: Floats) -> Outlier:
        """How far the first tokens exceed the others in a result; 0 if they are not compared."""
        first, others = self.reached(name, values)
        return Outlier(name, first / max(others, _TINY))

    def reached(self, name: str, values: Floats) -> tuple[float, float]:
        """The greatest magnitudes of the first tokens and of the others in a result; 0 if they are not compared."""
        result = self._results[name]
        if result.by_chunk or result.kind in _NOT_COMPARED or not self._first:
            return 0.0, 0.0
        return _largest(values[: self._first]), _largest(values[self._first :])

    def take(self, apart: _SeenApart) -> None:
        """Observe what a window has shown."""
        for name, values in apart.kept:
            self._keep(self._cache[name], values)
        of_experts = (Outlier(name, first / max(others, _TINY)) for name, (first, others) in apart.reached.items())
        for outlier in (apart.outlier, *of_experts):
            if outlier.ratio > self.outlier.ratio:
                self.outlier = outlier

    def _keep(self, tensor: KvTensor, values: Floats) -> None:
        self.rows.setdefault(tensor, values[: self._first].copy())
        if tensor.result != "cache":
            return
        others, at = values[self._first :], (tensor.layer, tensor.head)
        if at not in self.reach:
            self.reach[at] = HeadRange.none(self._spec, tensor.layer)
        reach = self.reach[at]
        if tensor.kind == "value":
            rotation = value_rotation(self._spec, others.shape[1])
            self.reach[at] = reach.with_values(np.abs(others @ rotation).max())
        else:
            self.reach[at] = reach.with_keys(others)


class _SeenApart:
    """What is needed of the results of a window that runs beside others.

    Attributes:
        kept: keys, values and states by name.
        outlier: see `Survey`.
        reached: by results that all experts of a layer share, see `_Seen.reached`. One expert's own are 0 for tokens
            that have not chosen it.
    """

    def __init__(self, seen: _Seen) -> None:
        self.kept: list[tuple[str, Floats]] = []
        self.reached: dict[str, tuple[float, float]] = {}
        self.outlier = Outlier("embedding", 0.0)
        self._seen = seen

    def observe(self, name: str, values: Floats) -> None:
        if self._seen.is_kept(name):
            self.kept.append((name, values))
        elif name in self._seen.of_experts:
            (first, others), (old_first, old_others) = self._seen.reached(name, values), self.reached.get(name, (0, 0))
            self.reached[name] = max(first, old_first), max(others, old_others)
        elif (outlier := self._seen.compared(name, values)).ratio > self.outlier.ratio:
            self.outlier = outlier


def _largest(values: Floats) -> float:
    """The greatest magnitude, without an array of magnitudes."""
    return float(np.maximum(values.max(), -values.min()))


class _PartialOps(NumpyOps):
    """Reads a few rows of the embedding table, and the head some rows at a time: neither is in memory as a whole."""

    def __init__(
        self,
        tensors: Tensors,
        weights: Weights,
        tokens: int,
        context: int,
        observe: Observer | None = None,
        changes: Changes = NO_CHANGES,
    ) -> None:
        self._tensors = tensors
        super().__init__(tensors.spec, weights, tokens, context, observe, changes)

    def embed(self, tokens: NDArray[Any], name: str) -> Floats:
        self.begin(self._window[0], tokens)
        return self._seen(name, self._tensors.tensor(EMBEDDING, tokens))

    def product(self, x: Floats, weight: str, rows: slice, gain: float) -> Floats:
        if weight != HEAD:
            return super().product(x, weight, rows, gain)
        blocks = (self._tensors.tensor(weight, rows) for rows in blocks_of_rows(self._spec.result_width))
        columns = [x @ by_inputs(block) * np.float32(gain) for block in blocks]
        return np.concatenate(columns, axis=-1)
