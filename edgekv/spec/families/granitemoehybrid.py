"""Granite 4 without experts and Mamba layers (Micro, 1B, 350M): Granite 3, whose gates are fused, under other names."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import granite

MODEL_TYPES = ("granitemoehybrid",)

STORED_NAMES = (
    ("mlp.gate_up_proj", "shared_mlp.input_linear"),
    ("mlp.down_proj", "shared_mlp.output_linear"),
)
EXPERTS, INTERMEDIATE = 8, 1024  # defaults of absent fields
DENSE = "Take a dense Granite 4, such as granite-4.0-micro."


def describe(config: Config) -> DecoderSpec:
    """Granite 3's decoder. The feed-forward is what the architecture calls the shared expert."""
    if config.count("num_local_experts", EXPERTS):
        raise config.refusal("num_local_experts", "0: graphs have no experts beside a shared one", fix=DENSE)
    kinds = "layer_types" if "layer_types" in config else "layers_block_type"
    layers = config.size("num_hidden_layers")
    if kinds not in config or set(config.layer_types(layers, kinds)) != {"full_attention"}:
        raise config.refusal(kinds, f"attention in all {layers} layers: graphs have no Mamba layers", fix=DENSE)
    if config.text("position_embedding_type", "none") != "rope":
        raise config.refusal("position_embedding_type", "'rope'", fix=DENSE)
    width = config.size("shared_intermediate_size", INTERMEDIATE)
    config.expect("mlp_bias", False)
    config.expect("normalization_function", "rmsnorm")
    spec = granite.describe(config.changed(intermediate_size=width, layer_types=["full_attention"] * layers))
    return replace(spec, fused=frozenset({"mlp"}), stored_names=STORED_NAMES)
