"""Encodings of LoRA slots: fixed at export, for every adapter that is added later."""

from __future__ import annotations

from collections.abc import Mapping

from edgekv.spec import (
    HEADROOM,
    LORA_A,
    DecoderSpec,
    LoraSlots,
    LoraTarget,
    lora_added,
    lora_b,
    lora_group,
    lora_reach,
)
from exporters.quantize.encodings import projection_results
from quant import Encoding, Range

_PRODUCT = 0.5
_HEADROOM_OF_B = 1.25


def lora_encodings(
    slots: LoraSlots,
    spec: DecoderSpec,
    ranges: Mapping[str, Range],
    encodings: Mapping[str, Encoding],
    reach: float,
    largest: Mapping[tuple[int, LoraTarget], float],
) -> dict[str, Encoding]:
    """An encoding for every input of the slots and every result that they add to a graph.

    Columns of A have the length 1, so `x A` reaches at most as far as x is long (Cauchy-Schwarz). `x A B` may reach as
    far as the result of the projection, times `reach`.

    The HTP drops the low 16 bits of a product of 16-bit activations. So B's step is as small as its use allows: the
    greatest `x A` times the greatest B is `_PRODUCT` times the greatest `x A B`, which costs `_PRODUCT` or so of its
    65,536 steps. `x A` is mostly far below its bound, and so are adapters: those of rank 8 of SmolLM2-135M, trained for
    minutes, use 1 to 20 % of B's range.

    Args:
        slots: the slots of each layer.
        spec: the decoder.
        ranges: the greatest lengths of each group's input, by `lora_reach`.
        encodings: of the results of the projections.
        reach: how far adapters may change a projection, relative to the range of its result.
        largest: the largest element of B of the adapters to calibrate on, by layer and projection; others have the
            stated range.
    """
    results = projection_results(spec)
    encodings_of_slots = {LORA_A: Encoding.symmetric(1.0, "s16")}
    for layer in range(spec.layers):
        for group, _ in slots.groups_of_layer(layer):
            name = lora_reach(layer, group)
            encodings_of_slots[name] = Encoding.symmetric(HEADROOM * ranges[name].absmax, "u16")
        for slot in slots.of_layer(layer):
            ends = (end for name in results[layer, slot.target] for end in encodings[name].reach)
            most = reach * max(abs(end) for end in ends)
            encodings_of_slots[lora_added(layer, slot.target)] = Encoding.symmetric(most, "u16")
            reduced = encodings_of_slots[lora_reach(layer, lora_group(slot.target))].reach[1]
            seen = _HEADROOM_OF_B * largest.get((layer, slot.target), 0.0)
            encodings_of_slots[lora_b(layer, slot.target)] = Encoding.symmetric(
                seen or _PRODUCT * most / reduced, "s16"
            )
    return encodings_of_slots
