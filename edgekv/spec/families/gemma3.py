"""Gemma 3, the text decoder: q and k norms, and a rotary embedding of their own for the layers with a window."""

from __future__ import annotations

from dataclasses import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families.gemma2 import gemma
from edgekv.spec.llama_like import windows
from edgekv.spec.rope import Rope

MODEL_TYPES = ("gemma3_text",)

# Where config.json says nothing.
WINDOW = 4096
THETA = 1e6
LOCAL_THETA = 1e4
PATTERN = 6  # every sixth layer attends to all tokens


def describe(config: Config) -> DecoderSpec:
    """Gemma's decoder with two rotary embeddings (arXiv 2503.19786); `rope_scaling` is that of the global layers."""
    config.expect("attn_logit_softcapping", None)
    spec = gemma(config)
    newer = config.table("rope_parameters")
    if newer and "full_attention" not in newer:
        raise config.refusal("rope_parameters", "a table for full_attention and one for sliding_attention")
    full = newer.table("full_attention") if newer else config.table("rope_scaling")
    theta = config.number("rope_theta", THETA)
    local_theta = config.number("rope_local_base_freq", LOCAL_THETA)
    pattern = config.size("sliding_window_pattern", PATTERN)
    return replace(
        spec,
        qk_norm=True,
        rope=Rope.from_table(full, config, spec.head_dim, theta=theta),
        local_rope=Rope.from_table(newer.table("sliding_attention"), config, spec.head_dim, theta=local_theta),
        windows=windows(
            config,
            spec.layers,
            config.optional_size("sliding_window", WINDOW),
            lambda layer: bool((layer + 1) % pattern),
        ),
    )
