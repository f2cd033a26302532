"""Seed-OSS: a Llama with biases on queries, keys and values."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION_INPUTS, MLP, llama_like, same_window

MODEL_TYPES = ("seed_oss",)

DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288}


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder; the bias of o_proj has a flag of its own."""
    config.expect("hidden_act", "silu", "swish")
    config = config.with_defaults(**DEFAULTS)
    spec = llama_like(config)
    biased = ATTENTION_INPUTS if config.flag("attention_bias", True) else frozenset[str]()
    biased |= {"self_attn.o_proj"} if config.flag("attention_out_bias") else set()
    biased |= MLP if config.flag("mlp_bias") else set()
    return replace(spec, biased=biased, windows=same_window(config, spec.layers, None))
