"""IQuest Coder: a Llama with defaults of its own."""

from __future__ import annotations

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import llama

MODEL_TYPES = ("iquestcoder",)

DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder."""
    config.expect("clip_qkv", None)
    config.expect("use_sliding_window", False)
    return llama.describe(config.with_defaults(**DEFAULTS))
