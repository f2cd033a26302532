"""Helium: a Llama whose rotary embedding has interleaved pairs."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import llama

MODEL_TYPES = ("helium",)

DEFAULTS = {
    "num_key_value_heads": 20,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-8,
    "rope_theta": 1e5,
}


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder; o_proj has no bias."""
    spec = llama.describe(config.with_defaults(**DEFAULTS))
    return replace(spec, pairs="interleaved", biased=spec.biased - {"self_attn.o_proj"})
