"""Mistral: a Llama whose layers may all see the same number of tokens."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import llama_like, same_window

MODEL_TYPES = ("mistral",)

DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096}


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with `sliding_window` for every layer (arXiv 2310.06825)."""
    config.expect("hidden_act", "silu", "swish")
    config = config.with_defaults(**DEFAULTS)
    spec = llama_like(config)
    return replace(spec, windows=same_window(config, spec.layers, config.optional_size("sliding_window")))
