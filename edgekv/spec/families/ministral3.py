"""Ministral 3: a Mistral with yarn, which scales queries beyond the original context."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import llama_like, same_window

MODEL_TYPES = ("ministral3",)

DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
}
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def describe(config: Config) -> DecoderSpec:
    """Mistral's decoder with yarn.

    Queries at position p are multiplied by 1 + beta * log(1 + floor(p / original context)), which is 1 in the original
    context. Graphs have one rotation table for queries and keys, so contexts are bounded by the original one.
    """
    config.expect("hidden_act", "silu", "swish")
    config = config.with_defaults(**DEFAULTS).with_filled(rope_parameters=ROPE)
    spec = llama_like(config)
    spec = replace(spec, windows=same_window(config, spec.layers, config.optional_size("sliding_window")))
    table = config.table("rope_scaling") or config.table("rope_parameters")
    table.ignore("max_position_embeddings")
    if not table.zero_or_number("llama_4_scaling_beta"):
        return spec
    if spec.rope.rope_type != "yarn":
        raise table.refusal("rope_type", "yarn, beside llama_4_scaling_beta")
    name = "original_max_position_embeddings"
    original = min(spec.max_positions, int(spec.rope.number(name)))
    return replace(spec, max_positions=original, bound_by=f"{name} (beyond it, llama_4_scaling_beta)")
