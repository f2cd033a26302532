"""Code World Model: a Llama with windows in three of four layers."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import biases, llama_like, windows

MODEL_TYPES = ("cwm",)

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8192}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
DEFAULTS |= {"rope_theta": 1e6, "sliding_window": 8192}
PATTERN = 4  # the first of four layers has full attention


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with windows."""
    config.expect("hidden_act", "silu", "swish")
    config.expect("attention_bias", False)
    config = config.with_defaults(**DEFAULTS)
    if "rope_scaling" not in config:
        config = config.with_filled(rope_parameters=LLAMA3)
    spec = llama_like(config)
    window = config.optional_size("sliding_window")
    return replace(
        spec,
        biased=biases(config),
        windows=windows(config, spec.layers, window, lambda layer: layer % PATTERN != 0),
    )
