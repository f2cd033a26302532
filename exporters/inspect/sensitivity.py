"""What each matrix costs in each integer type: the divergence from the float model if it alone is quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.graphs.decoder import decoder_layer, logits
from edgekv.spec.tensors import HEAD, by_inputs, by_outputs
from exporters.checkpoint.tensors import Tensors
from exporters.inspect.tally import log_softmax
from exporters.progress import Progress, silent
from exporters.quantize.reference import Floats, NumpyOps, Weights
from quant import QuantizedWeight, WeightDtype

_WINDOWS, _TOKENS = 2, 128

Candidates = Mapping[str, Mapping[WeightDtype, QuantizedWeight]]
"""Matrices by name and type."""

Costs = dict[str, dict[WeightDtype, float]]
"""KL divergence from the float model if one matrix alone has a type, nats a token, by name and type."""


def matrix_costs(
    quantized: Callable[[int | None], Candidates],
    tensors: Tensors,
    windows: Sequence[NDArray[Any]],
    context: int,
    progress: Progress = silent,
    *,
    sink: int = 0,
    has_gain: bool = False,
) -> Costs:
    """Measure what matrices cost.

    Each is replaced alone and its relative squared error measured at the end of its layer. The effect of an error there
    on the logits is measured once per layer, with all of its matrices replaced by their first candidates; KL grows with
    the square of the error.

    Args:
        quantized: the candidates of a layer, called once for each in order, then with None for those behind the layers.
        tensors: the exact matrices.
        windows: token ids `[T]`; the first 128 of two windows are used.
        context: context length for the rotary embedding.
        progress: called after every layer.
        sink: number of first tokens of each window that no graph computes; they stay exact.
        has_gain: whether candidates are multiplied by the gain that the decoder gives them, as a bundle's are.
    """
    spec = tensors.spec
    weights, costs = Weights(tensors), Costs()
    texts = [np.asarray(window[:_TOKENS]) for window in windows[:_WINDOWS]]
    ops = [_ReplacingOps(spec, weights, len(text), context) for text in texts]
    for op in ops:
        op.sink, op.has_gain = sink, has_gain
    states = [[of.embed(text, "embedding") for of, text in zip(ops, texts, strict=True)]]
    together = list[float]()
    for layer in range(spec.layers):
        progress("sensitivity", layer, spec.layers + 1)
        weights.drop()
        candidates = quantized(layer)
        starts = states[0]
        states = [
            [of.run(variant, layer, state) for of, state in zip(ops, followed, strict=True)]
            for variant, followed in enumerate(states)
        ]
        for key, types in candidates.items():
            costs[key] = {
                dtype: _apart(_replaced(ops, {key: weight}, layer, starts, _TRIAL), states[0])
                for dtype, weight in types.items()
            }
        first = {key: next(iter(types.values())) for key, types in candidates.items()}
        states.append(_replaced(ops, first, layer, starts, len(states)))
        together.append(_apart(states[-1], states[0]))
    weights.drop()
    exact = [logits(of, spec, state) for of, state in zip(ops, states[0], strict=True)]
    tokens = sum(len(text) for text in texts)
    divergences = [
        sum(_divergence(one, logits(of, spec, state)) for of, one, state in zip(ops, exact, followed, strict=True))
        for followed in states[1:]
    ]
    nats = [after / max(before, 1e-30) / tokens for after, before in zip(divergences, together, strict=True)]
    for key, errors in costs.items():
        costs[key] = {dtype: error * nats[int(key.split(".")[2])] for dtype, error in errors.items()}
    for dtype, weight in quantized(None).get(HEAD, {}).items():
        parts = zip(ops, exact, states[0], strict=True)
        replaced = {HEAD: by_outputs(weight.dequantize())}
        loss_nats = sum(_divergence(one, of.with_replaced(replaced, logits, state)) for of, one, state in parts)
        costs.setdefault(HEAD, {})[dtype] = loss_nats / tokens
    progress("sensitivity", spec.layers + 1, spec.layers + 1)
    return costs


def _replaced(
    ops: Sequence[_ReplacingOps],
    quantized: Mapping[str, QuantizedWeight],
    layer: int,
    starts: Sequence[Floats],
    variant: int,
) -> list[Floats]:
    """The outputs `[T, hidden]` of a layer with these matrices, for each window, as another variant of the text."""
    matrices = {key: by_outputs(weight.dequantize()) for key, weight in quantized.items()}
    for op in ops:
        op.fork(variant, 0)
    return [of.with_replaced(matrices, decoder_layer, layer, start) for of, start in zip(ops, starts, strict=True)]


_TRIAL = -1
"""The variant in which one matrix is replaced, in one layer."""


class _ReplacingOps(NumpyOps):
    """The float reference with some matrices replaced, for all tokens but the sink."""

    sink = 0
    has_gain = False
    replaced: Mapping[str, Floats] = {}

    def run(self, variant: int, layer: int, state: Floats) -> Floats:
        """A layer of a variant of the text; what its layers share is kept under its number."""
        self.begin(variant, self._window[1])
        return decoder_layer(self, self._spec, layer, state)

    def with_replaced(self, replaced: Mapping[str, Floats], step: Callable[..., Floats], *inputs: object) -> Floats:
        """A step of the decoder with these matrices."""
        self.replaced = replaced
        result = step(self, self._spec, *inputs)
        self.replaced = {}
        return result

    def product(self, x: Floats, weight: str, rows: slice, gain: float) -> Floats:
        stored = self.replaced.get(weight)
        if stored is None:
            return super().product(x, weight, rows, gain)
        product: Floats = x @ by_inputs(stored[rows])
        if gain != 1 and not self.has_gain:
            product *= np.float32(gain)
        if self.sink:
            product[: self.sink] = super().product(x[: self.sink], weight, rows, gain)
        return product


def _apart(some: Sequence[Floats], exact: Sequence[Floats]) -> float:
    """The squared error of states relative to their squares, summed over tokens: later norms divide by these."""
    return sum(float((_squares(a - b) / _squares(b)).sum()) for a, b in zip(some, exact, strict=True))


def _squares(state: Floats) -> NDArray[np.float64]:
    """`[T]`, the sum of squares of each token."""
    squares: NDArray[np.float64] = np.square(state, dtype=np.float64).sum(axis=-1)
    return squares + np.finfo(np.float32).tiny


def _divergence(exact: Floats, other: Floats) -> float:
    """The Kullback-Leibler divergence of next tokens, summed over the rows of logits `[T, V]`, nats."""
    one, two = (log_softmax(rows) for rows in (exact, other))
    return float((np.exp(one) * (one - two)).sum())
