"""GLM-4-0414: a GLM-4 with norms on both sides of each block."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import glm

MODEL_TYPES = ("glm4",)

STORED_NAMES = (
    ("post_attention_layernorm", "post_self_attn_layernorm"),
    ("pre_feedforward_layernorm", "post_attention_layernorm"),
    ("post_feedforward_layernorm", "post_mlp_layernorm"),
)


def describe(config: Config) -> DecoderSpec:
    """GLM's decoder with further norms."""
    return replace(glm.describe(config), post_norms=True, stored_names=STORED_NAMES)
