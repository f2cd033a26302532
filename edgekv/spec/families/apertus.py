"""Apertus: a Llama with q and k norms and xIELU, an activation with two numbers of each layer, without a gate."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION, llama_like, same_window

MODEL_TYPES = ("apertus",)

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1.2e7, "factor": 8.0, "original_max_position_embeddings": 8192}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
DEFAULTS = {"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 1.2e7}
STORED_NAMES = (
    ("input_layernorm", "attention_layernorm"),
    ("post_attention_layernorm", "feedforward_layernorm"),
)


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with norms of heads and another feed-forward (arXiv 2509.14233)."""
    config.expect("hidden_act", "xielu")
    config = config.with_defaults(**DEFAULTS)
    if "rope_scaling" not in config:
        config = config.with_filled(rope_parameters=LLAMA3)
    spec = llama_like(config)
    return replace(
        spec,
        activation="xielu",
        gated=False,
        qk_norm="head",
        biased=ATTENTION if config.flag("attention_bias") else frozenset[str](),
        windows=same_window(config, spec.layers, None),
        stored_names=STORED_NAMES,
    )
