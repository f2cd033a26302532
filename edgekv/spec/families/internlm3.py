"""InternLM 3: a Llama whose flags of biases have other names."""

from __future__ import annotations

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import llama

MODEL_TYPES = ("internlm3",)

DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5}
FIELDS = {"attention_bias": "qkv_bias", "mlp_bias": "bias"}


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder."""
    return llama.describe(config.with_names(**FIELDS).with_defaults(**DEFAULTS))
