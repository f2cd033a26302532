"""ERNIE 4.5 without experts: a Llama whose rotary embedding has interleaved pairs."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION, MLP, llama_like, same_window

MODEL_TYPES = ("ernie4_5",)

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder; one flag for all biases."""
    config.expect("hidden_act", "silu", "swish")
    config = config.with_defaults(**DEFAULTS)
    spec = llama_like(config)
    biased = ATTENTION | MLP if config.flag("use_bias") else frozenset[str]()
    return replace(spec, pairs="interleaved", biased=biased, windows=same_window(config, spec.layers, None))
