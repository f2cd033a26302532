"""Encodings for TFLite's kernels: 16-bit activations are symmetric, and some scales are fixed by the format."""

from __future__ import annotations

import math
from collections.abc import Mapping

from edgekv.kv import KvDtype
from quant import Encoding, Range

_FRACTION = Encoding("s16", scale=1 / 32768, zero_point=0)  # of LOGISTIC and TANH, by the format's specification
_LEAST_MASK_DEPTH = 64.0
_SOFTMAX_REACH = 12.0  # exp(-12) is below half a step of a 16-bit probability


def symmetric_encodings(ranges: Mapping[str, Range], kv_dtype: KvDtype) -> dict[str, Encoding]:
    """An encoding for every result and every graph input but those of the rotary embedding.

    Activations reach as far as the greatest magnitude seen, on both sides of 0. Cache tensors have the clipping of
    least squared error. The mask is deep enough that a masked position vanishes from the softmax.
    """
    encodings: dict[str, Encoding] = {}
    depth = _LEAST_MASK_DEPTH
    for name, seen in ranges.items():
        if ".scores." in name:
            depth = max(depth, math.ceil(seen.high - seen.low + _SOFTMAX_REACH))
    for name, seen in ranges.items():
        if name.startswith("past_"):
            encodings[name] = seen.symmetric(kv_dtype)
        elif name.endswith(".sigmoid") or ".tanh" in name:
            encodings[name] = _FRACTION
        else:
            encodings[name] = Encoding.symmetric(seen.absmax, "s16")
        if ".scores." in name:
            masked = name.replace(".scores.", ".masked.")
            encodings[masked] = Encoding.symmetric(max(seen.absmax, depth), "s16")
    encodings["probabilities"] = _FRACTION
    encodings["attention_mask"] = Encoding.symmetric(depth, "s16")
    encodings["logits"] = encodings["head"]
    return encodings
