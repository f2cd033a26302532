"""Kinds of results, and how the encoding of each kind follows from the values seen on calibration text.

A kind follows from the operation that computes a result, never from its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from edgekv.spec.geometry import ZERO_POINTS, KvDtype
from quant import Encoding, Range

ResultKind = Literal[
    "embedding", "linear", "norm", "sum", "product", "gelu", "sigmoid", "tanh", "softmax",
    "scores", "masked", "attended", "cache", "state", "tail", "relu", "share", "decay_sum", "gathered",
]  # fmt: skip

HEADROOM = 1.5
"""How far 16-bit ranges reach beyond the values seen on calibration text: what other texts clip costs more than the
wider step, half a bit."""

PRODUCT_HEADROOM = 2.0
"""The same for products, whose extremes grow with those of both factors: in SmolLM2-135M a text reached 1.9 times what
12,800 other tokens did, and clipping it cost one token 0.2 nats."""

_MIN_MASK_DEPTH = 64.0
_DECAY_REACH = 12.0  # as for the softmax
_SOFTMAX_REACH = 12.0  # exp(-12) is below half a step of a 16-bit probability


@dataclass(frozen=True, slots=True)
class Result:
    """A named result of a decoder.

    Attributes:
        kind: what computes it.
        sources: the names of the results whose ranges it covers: its own, the scores' if it is masked, or those of all
            queries that share keys.
        by_chunk: whether the reference computes it chunk by chunk of a text, so that its rows are not a text's tokens.
        scaled: of a result times a constant, that result's name and the constant: it has the same integers. On the HTP
            another encoding is rounded in another way for one row than for several.
    """

    kind: ResultKind
    sources: tuple[str, ...]
    by_chunk: bool = False
    scaled: tuple[str, float] | None = None


@dataclass(frozen=True, slots=True)
class EncodingTypes:
    """Integer types of a bundle's encodings.

    Attributes:
        activations: `u16`, with a zero point that fits the range; or `s16` with zero point 0, which TFLite requires.
        cache: of keys and values.
        states: of the states of convolutions.
    """

    activations: Literal["u16", "s16"]
    cache: KvDtype
    states: KvDtype = "u16"

    @property
    def is_symmetric(self) -> bool:
        """Whether activations have zero point 0."""
        return self.activations == "s16"


Rule = Callable[[Range, EncodingTypes, float], Encoding]
"""Computes an encoding from the observed values, the types and the depth of the mask."""


def _covers(headroom: float) -> Rule:
    """The range of all observed values, with headroom."""

    def rule(seen: Range, types: EncodingTypes, depth: float) -> Encoding:
        if types.is_symmetric:
            return Encoding.symmetric(headroom * seen.absmax, types.activations)
        return Encoding.asymmetric(headroom * seen.low, headroom * seen.high, types.activations)

    return rule


def _fixed(low: float, high: float) -> Rule:
    """A range that the kernels require; the TFLite specification defines one for all types."""

    def rule(seen: Range, types: EncodingTypes, depth: float) -> Encoding:
        if types.is_symmetric:
            return Encoding(types.activations, 1 / 32768, 0)
        return Encoding.asymmetric(low, high, types.activations)

    return rule


def _clips(seen: Range, types: EncodingTypes, depth: float) -> Encoding:
    """Symmetric: 8 bits are clipped for the least squared error, 16 have room for headroom."""
    if types.cache == "s16":
        return Encoding.symmetric(HEADROOM * seen.absmax, types.cache)
    return seen.symmetric(types.cache)


def _holds_states(seen: Range, types: EncodingTypes, depth: float) -> Encoding:
    """Symmetric, with the zero point that empty rows have; 8 bits hold roots, which need no headroom for products."""
    if types.states in ("u8", "s8"):
        return seen.symmetric(types.states, of_roots=True)
    step = Encoding.symmetric(PRODUCT_HEADROOM * seen.absmax, "s16").scale
    return Encoding(types.states, step, ZERO_POINTS[types.states])


def _holds_tail(seen: Range, types: EncodingTypes, depth: float) -> Encoding:
    """Symmetric in 16 bits, 0 in the middle; later tokens may exceed all that was seen."""
    return Encoding("u16", Encoding.symmetric(PRODUCT_HEADROOM * seen.absmax, "s16").scale, ZERO_POINTS["u16"])


def _above_zero(seen: Range, types: EncodingTypes, depth: float) -> Encoding:
    """From 0 to the greatest value, with headroom, and to 1 if no value was above 0."""
    high = max(1.0, HEADROOM * seen.high)
    return Encoding.symmetric(high, types.activations) if types.is_symmetric else Encoding.asymmetric(0.0, high, "u16")


def _shares(seen: Range, types: EncodingTypes, depth: float) -> Encoding:
    """From 0 to the greatest value, with headroom, and at most 1: of heads that decay slowly, small values matter."""
    high = min(1.0, PRODUCT_HEADROOM * seen.high)
    return Encoding.symmetric(high, types.activations) if types.is_symmetric else Encoding.asymmetric(0.0, high, "u16")


def _decays(seen: Range, types: EncodingTypes, depth: float) -> Encoding:
    """Up to 0, and no lower than what leaves nothing."""
    low = -min(PRODUCT_HEADROOM * -seen.low, _DECAY_REACH)
    return Encoding.symmetric(-low, types.activations) if types.is_symmetric else Encoding.asymmetric(low, 0.0, "u16")


def _reaches_mask(seen: Range, types: EncodingTypes, depth: float) -> Encoding:
    """The range of the scores, extended by the depth of the mask."""
    if types.is_symmetric:
        return Encoding.symmetric(max(HEADROOM * seen.absmax, depth), types.activations)
    return Encoding.asymmetric(min(HEADROOM * seen.low, -depth), HEADROOM * seen.high, types.activations)


_COVERS = _covers(HEADROOM)  # one rule: results of these kinds may share a name

RULES: dict[ResultKind, Rule] = {
    "embedding": _COVERS,
    "linear": _COVERS,
    "norm": _COVERS,
    "sum": _COVERS,
    "product": _covers(PRODUCT_HEADROOM),
    "gelu": _covers(PRODUCT_HEADROOM),
    "sigmoid": _fixed(0.0, 1.0),
    "tanh": _fixed(-1.0, 1.0),
    "softmax": _fixed(0.0, 1.0),
    "scores": _COVERS,
    "masked": _reaches_mask,
    "attended": _COVERS,
    "cache": _clips,
    "state": _holds_states,
    "tail": _holds_tail,
    "relu": _above_zero,
    "share": _shares,
    "decay_sum": _decays,
    "gathered": _COVERS,
}
"""The encoding rule of each kind."""

UNOBSERVED: frozenset[ResultKind] = frozenset({"softmax"})
"""Kinds that calibration does not observe."""


def mask_depth(scores: Iterable[Range]) -> float:
    """How far the mask must lower a score so that its position vanishes from the softmax for any cache."""
    spans = (HEADROOM * (seen.high - seen.low) for seen in scores)
    return max([_MIN_MASK_DEPTH, *(math.ceil(span + _SOFTMAX_REACH) for span in spans)])


def mask_encoding(depth: float, types: EncodingTypes) -> Encoding:
    """The encoding of the attention masks; 0 is the greatest integer of `u16`."""
    if types.is_symmetric:
        return Encoding.symmetric(depth, types.activations)
    return Encoding(types.activations, scale=depth / 65535, zero_point=65535)


def rotary_encoding(attention_factor: float, types: EncodingTypes) -> Encoding:
    """The encoding of cosines and sines, from minus to plus the factor, both ends exact."""
    return Encoding(types.activations, scale=attention_factor / 32767, zero_point=0 if types.is_symmetric else 32768)
