"""HyperCLOVA X SEED: a Granite 3 with norms on both sides of each block."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import granite

MODEL_TYPES = ("hyperclovax",)

STORED_NAMES = (
    ("post_attention_layernorm", "post_norm1"),
    ("pre_feedforward_layernorm", "post_attention_layernorm"),
    ("post_feedforward_layernorm", "post_norm2"),
)


def describe(config: Config) -> DecoderSpec:
    """Granite's decoder, but `logits_scaling` multiplies, and head_dim says the scale of scores by default."""
    spec = granite.describe(config)
    has_post_norms = config.flag("use_post_norm", True)
    return replace(
        spec,
        post_norms=has_post_norms,
        stored_names=STORED_NAMES if has_post_norms else (),
        query_gain=config.number("attention_multiplier", spec.head_dim**-0.5),
        logits_gain=config.number("logits_scaling", 1.0),
    )
