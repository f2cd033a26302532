"""EXAONE 3 and 3.5: a Llama under other names."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import llama

MODEL_TYPES = ("exaone",)

DEFAULTS = {
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
FIELDS = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
STORED_NAMES = (
    ("model.embed_tokens.", "transformer.wte."),
    ("model.layers.", "transformer.h."),
    ("model.norm.", "transformer.ln_f."),
    ("self_attn.o_proj", "attn.attention.out_proj"),
    ("self_attn.", "attn.attention."),
    ("input_layernorm", "ln_1"),
    ("post_attention_layernorm", "ln_2"),
    ("mlp.gate_proj", "mlp.c_fc_0"),
    ("mlp.up_proj", "mlp.c_fc_1"),
    ("mlp.down_proj", "mlp.c_proj"),
)


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder (arXiv 2412.04862)."""
    spec = llama.describe(config.with_names(**FIELDS).with_defaults(**DEFAULTS))
    return replace(spec, stored_names=STORED_NAMES)
