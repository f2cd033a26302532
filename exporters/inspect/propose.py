"""Suggests a recipe: 8 bits for the 4-bit matrices that gain most per byte."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle, BundleWeights
from edgekv.errors import UsageError
from edgekv.graphs.decoder import decoder_layer, logits
from edgekv.spec.tensors import HEAD, by_inputs, by_outputs, matrices
from exporters.inspect.tally import log_softmax
from exporters.progress import Progress, silent
from exporters.quantize.recipe import Recipe, WeightRule
from exporters.quantize.reference import Floats, NumpyOps, Tensors, Weights
from exporters.targets.capabilities import ONNX
from quant import WEIGHT_TYPES

_WINDOWS, _TOKENS = 2, 128


class Promotion(msgspec.Struct, frozen=True, kw_only=True):
    """A 4-bit matrix that gets 8 bits.

    Attributes:
        tensor: its name.
        dtype: its present type.
        nats: expected reduction of the KL divergence from the float32 model, nats a token.
        bytes: additional bytes.
    """

    tensor: str
    dtype: str
    nats: float
    bytes: int


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A suggested recipe within a size budget.

    Attributes:
        weights_bytes: present size of all weights, without file headers.
        budget_bytes: size limit.
        expected_bytes: size with the suggested recipe.
        nats: KL divergence due to all 4-bit matrices now, summed over matrices measured one at a time.
        expected_nats: the same with the suggested recipe.
        promotions: the changes, largest gain per byte first.
    """

    weights_bytes: int
    budget_bytes: int
    expected_bytes: int
    nats: float
    expected_nats: float
    promotions: list[Promotion]

    def recipe(self, before: Recipe) -> Recipe:
        """The recipe `before` with one more rule per promotion."""
        methods = ((each.tensor, before.rule(each.tensor).method) for each in self.promotions)
        rules = [
            WeightRule(tensors=name, dtype="int8", method="gptq" if method == "stored" else method)
            for name, method in methods
        ]
        return msgspec.structs.replace(before, weights=(*before.weights, *rules))


def parse_budget(option: str, given: str) -> float | int:
    """Parse a number of bytes (int), or a factor of the present size such as `1.2x` (float).

    Raises:
        UsageError: it is neither.
    """
    try:
        budget = float(given[:-1]) if given.endswith("x") else int(given)
    except ValueError:
        budget = 0
    if not 0 < budget < math.inf:
        raise UsageError(option, got=repr(given), expected="1.2x, or bytes", fix="Use --size-budget 1.2x.")
    return budget


def propose(
    bundle: Bundle,
    tensors: Tensors,
    windows: Sequence[NDArray[Any]],
    budget: float | int,
    progress: Progress = silent,
) -> Proposal:
    """Choose the matrices that get 8 bits, in the order of expected gain per byte, within the budget.

    Args:
        bundle: the bundle to improve.
        tensors: its checkpoint, with the transforms that the recipe folds into the weights.
        windows: token ids `[T]`; the first 128 of two windows are used.
        budget: size limit of all weights: bytes if int, a factor of the present size if float.
        progress: called after every layer.

    Raises:
        BundleError: the bundle has no ONNX graphs.
        UsageError: no matrix has less than 8 bits, or no change fits the budget.
    """
    ONNX.check(bundle)
    weights = bundle.weights()
    now = weights.places.total_bytes
    most = int(now * budget) if isinstance(budget, float) else budget
    small = [each for each in bundle.manifest.recipe.weights if WEIGHT_TYPES[each.dtype].bits < 8]
    if not small:
        raise UsageError(
            "--suggest-recipe",
            got="a bundle without 4-bit matrices",
            expected="4-bit matrices, which could get 8 bits",
            fix="Use edgekv eval --layers to find other causes.",
        )
    manifest = bundle.manifest
    sink = 0 if manifest.sink is None else len(manifest.sink.tokens)
    costs = matrix_costs(
        weights, tensors, windows, manifest.context, [each.tensor for each in small], progress, sink=sink
    )
    candidates = []
    for each in small:
        outputs, inputs = matrices(tensors.spec)[each.tensor]
        more = outputs * (inputs + 4) - weights.places.bytes(each.tensor)
        candidates.append(Promotion(tensor=each.tensor, dtype=each.dtype, nats=costs[each.tensor], bytes=more))
    candidates.sort(key=lambda candidate: candidate.nats / candidate.bytes, reverse=True)
    chosen, size = [], now
    for candidate in candidates:
        if size + candidate.bytes <= most and candidate.nats > 0:
            chosen.append(candidate)
            size += candidate.bytes
    if not chosen:
        raise UsageError(
            "--size-budget",
            got=f"{most} bytes",
            expected=f"{now + min(each.bytes for each in candidates)} or more, which give one matrix 8 bits",
            fix=f"Allow more: all weights have {now} bytes now.",
        )
    return Proposal(
        weights_bytes=now,
        budget_bytes=most,
        expected_bytes=size,
        nats=sum(each.nats for each in candidates),
        expected_nats=sum(each.nats for each in candidates if each not in chosen),
        promotions=chosen,
    )


def matrix_costs(
    stored: BundleWeights,
    tensors: Tensors,
    windows: Sequence[NDArray[Any]],
    context: int,
    keys: Sequence[str],
    progress: Progress = silent,
    *,
    sink: int = 0,
) -> dict[str, float]:
    """KL divergence from the float32 model if one matrix alone is quantized, nats a token, by name.

    Each matrix is replaced alone and its squared error measured at the end of its layer. The effect of an error there
    on the logits is measured once per layer, with all of its matrices replaced; KL grows with the square of the error.
    8-bit integers leave about 1/300 of the error of 4-bit ones.

    Args:
        stored: the bundle's matrices.
        tensors: the exact matrices.
        windows: token ids `[T]`.
        context: context length for the rotary embedding.
        keys: names of the matrices.
        progress: called after every layer.
        sink: number of first tokens of each window that no graph computes; they stay exact.
    """
    spec = tensors.spec
    weights = Weights(tensors)
    texts = [np.asarray(window[:_TOKENS]) for window in windows[:_WINDOWS]]
    ops = [_ReplacingOps(spec, weights, len(text), context) for text in texts]
    for each in ops:
        each.sink = sink
    states = [[of.embed(text, "embedding")] for of, text in zip(ops, texts, strict=True)]
    errors = dict.fromkeys(keys, 0.0)
    together = [0.0] * spec.layers
    for layer in range(spec.layers):
        progress("sensitivity", layer, spec.layers + 1)
        weights.drop()
        inside = [key for key in keys if key.startswith(f"model.layers.{layer}.")]
        replaced = {key: by_outputs(stored.matrix(key).dequantize()) for key in inside}
        for number, of in enumerate(ops):
            start = states[number][0]
            states[number] = [decoder_layer(of, spec, layer, state) for state in states[number]]
            exact = states[number][0]
            for key in inside:
                errors[key] += _square(of.replacing({key: replaced[key]}, layer, start) - exact)
            states[number].append(of.replacing(replaced, layer, start))
            together[layer] += _square(states[number][-1] - exact)
    weights.drop()
    head = {key: by_outputs(stored.matrix(key).dequantize()) for key in keys if key == HEAD}
    divergences = [0.0] * spec.layers
    for of, (final, *others) in zip(ops, states, strict=True):
        exact = logits(of, spec, final)
        for layer, state in enumerate(others):
            divergences[layer] += _divergence(exact, logits(of, spec, state))
        if head:
            of.replaced = head
            errors[HEAD] += _divergence(exact, logits(of, spec, final))
            of.replaced = {}
    progress("sensitivity", spec.layers + 1, spec.layers + 1)
    tokens = sum(len(text) for text in texts)
    followed = [after / max(before, 1e-30) for after, before in zip(divergences, together, strict=True)]
    return {
        key: error / tokens * (1.0 if key == HEAD else followed[int(key.split(".")[2])])
        for key, error in errors.items()
    }


class _ReplacingOps(NumpyOps):
    """The float reference with some matrices replaced by the bundle's, for all tokens but the sink."""

    sink = 0
    replaced: Mapping[str, Floats] = {}

    def replacing(self, replaced: Mapping[str, Floats], layer: int, states: Floats) -> Floats:
        """The output `[T, hidden]` of a layer with these matrices."""
        self.replaced = replaced
        found = decoder_layer(self, self._spec, layer, states)
        self.replaced = {}
        return found

    def product(self, x: Floats, weight: str, rows: slice, gain: float) -> Floats:
        stored = self.replaced.get(weight)
        if stored is None:
            return super().product(x, weight, rows, gain)
        product: Floats = x @ by_inputs(stored[rows])  # includes the gain
        if self.sink:
            product[: self.sink] = super().product(x[: self.sink], weight, rows, gain)
        return product


def _square(difference: Floats) -> float:
    return float(np.square(difference, dtype=np.float64).sum())


def _divergence(exact: Floats, other: Floats) -> float:
    """The Kullback-Leibler divergence of next tokens, summed over the rows of logits `[T, V]`, nats."""
    one, two = (log_softmax(each) for each in (exact, other))
    return float((np.exp(one) * (one - two)).sum())
