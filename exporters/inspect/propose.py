"""Suggests a recipe: 8 bits for the 4-bit matrices that gain most per byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from numpy.typing import NDArray

from edgekv.bundle import Bundle, BundleWeights
from edgekv.errors import UsageError
from edgekv.spec.tensors import HEAD, matrices
from exporters.capabilities import ONNX
from exporters.checkpoint.tensors import Tensors
from exporters.inspect.sensitivity import Candidates, matrix_costs
from exporters.progress import Progress, silent
from exporters.quantize.recipe import Recipe, WeightRule
from quant import WEIGHT_TYPES, WeightDtype


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
        methods = ((promotion.tensor, before.rule(promotion.tensor).method) for promotion in self.promotions)
        rules = [
            WeightRule(tensors=name, dtype="int8", method=method if method in ("nearest", "search") else "gptq")
            for name, method in methods
        ]
        return msgspec.structs.replace(before, weights=(*before.weights, *rules))


def parse_budget(option: str, size: str) -> float | int:
    """Parse a number of bytes (int), or a factor of the present size such as `1.2x` (float).

    Raises:
        UsageError: it is neither.
    """
    try:
        budget = float(size[:-1]) if size.endswith("x") else int(size)
    except ValueError:
        budget = 0
    if not 0 < budget < math.inf:
        raise UsageError(option, got=repr(size), expected="1.2x, or bytes", fix="Use --size-budget 1.2x.")
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
    small = [weight for weight in bundle.manifest.recipe.weights if WEIGHT_TYPES[weight.dtype].bits < 8]
    if not small:
        raise UsageError(
            "--suggest-recipe",
            got="a bundle without 4-bit matrices",
            expected="4-bit matrices, which could get 8 bits",
            fix="Use edgekv eval --layers to find other causes.",
        )
    manifest = bundle.manifest
    sink = 0 if manifest.sink is None else len(manifest.sink.tokens)
    stored = _Stored(weights, tuple((weight.tensor, weight.dtype) for weight in small))
    costs = matrix_costs(stored.layer, tensors, windows, manifest.context, progress, sink=sink, has_gain=True)
    candidates = []
    for weight in small:
        outputs, inputs = matrices(tensors.spec)[weight.tensor]
        more = outputs * (inputs + 4) - weights.places.bytes(weight.tensor)
        nats = costs[weight.tensor][weight.dtype]
        candidates.append(Promotion(tensor=weight.tensor, dtype=weight.dtype, nats=nats, bytes=more))
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
            expected=f"{now + min(promotion.bytes for promotion in candidates)} or more, which give one matrix 8 bits",
            fix=f"Allow more: all weights have {now} bytes now.",
        )
    return Proposal(
        weights_bytes=now,
        budget_bytes=most,
        expected_bytes=size,
        nats=sum(promotion.nats for promotion in candidates),
        expected_nats=sum(promotion.nats for promotion in candidates if promotion not in chosen),
        promotions=chosen,
    )


@dataclass(frozen=True, slots=True)
class _Stored:
    """The matrices of a bundle that may get more bits, with their types."""

    weights: BundleWeights
    small: tuple[tuple[str, WeightDtype], ...]

    def layer(self, layer: int | None) -> Candidates:
        """Those of a layer, or behind the layers."""
        prefix = HEAD if layer is None else f"model.layers.{layer}."
        return {key: {dtype: self.weights.matrix(key)} for key, dtype in self.small if key.startswith(prefix)}
