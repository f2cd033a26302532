"""Bamba: Mamba-2 in most layers, attention with a rotary embedding of half of a head in the others."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import biases, llama_like, mamba2

MODEL_TYPES = ("bamba",)

DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5}
STORED_NAMES = (
    ("model.norm.", "model.final_layernorm."),
    ("post_attention_layernorm", "pre_ff_layernorm"),
    ("mlp.", "feed_forward."),
    ("linear_attn.", "mamba."),
)


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with Mamba-2 in the layers that `attn_layer_indices` leaves out."""
    config = config.with_defaults(**DEFAULTS, partial_rotary_factor=0.5)
    config.expect("hidden_act", "silu", "swish")
    spec = llama_like(config, partial=True)
    attention = {*config.layers("attn_layer_indices", spec.layers)} if "attn_layer_indices" in config else set()
    if not attention:
        raise config.refusal("attn_layer_indices", "a layer with attention at least", got="none")
    mamba = mamba2(config, frozenset({*range(spec.layers)} - attention))
    return replace(spec, biased=biases(config), delta_rule=mamba, stored_names=STORED_NAMES)
