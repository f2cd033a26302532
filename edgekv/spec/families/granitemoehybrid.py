"""Granite 4 without experts (H-Micro, H-1B, H-350M; Micro, 1B, 350M): Granite 3, and layers with Mamba-2."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import granite
from edgekv.spec.llama_like import mamba2

MODEL_TYPES = ("granitemoehybrid",)

FULL, MAMBA = "full_attention", "linear_attention"
STORED_NAMES = (
    ("mlp.gate_up_proj", "shared_mlp.input_linear"),
    ("mlp.down_proj", "shared_mlp.output_linear"),
    ("linear_attn.", "mamba."),
)
EXPERTS, INTERMEDIATE = 8, 1024  # defaults of absent fields
DENSE = "Take one without experts, such as granite-4.0-h-micro."


def describe(config: Config) -> DecoderSpec:
    """Granite 3's decoder, whose gates are fused. The feed-forward is what the architecture calls the shared expert."""
    if config.count("num_local_experts", EXPERTS):
        raise config.refusal("num_local_experts", "0: graphs have no experts beside a shared one", fix=DENSE)
    kinds = "layer_types" if "layer_types" in config else "layers_block_type"
    layers = config.size("num_hidden_layers")
    layer_types = config.layer_types(layers, kinds) if kinds in config else (MAMBA,) * layers
    if set(layer_types) - {FULL, MAMBA} or FULL not in layer_types:
        raise config.refusal(
            kinds, "attention or mamba for each layer, one attention at least", got=", ".join(layer_types)
        )
    rotates = config.text("position_embedding_type", "none") == "rope"
    width = config.size("shared_intermediate_size", INTERMEDIATE)
    config.expect("mlp_bias", False)
    config.expect("normalization_function", "rmsnorm")
    spec = granite.describe(config.changed(intermediate_size=width, layer_types=[FULL] * layers))
    return replace(
        spec,
        fused=frozenset({"mlp"}),
        stored_names=STORED_NAMES,
        unrotated=frozenset() if rotates else frozenset(range(layers)),
        delta_rule=mamba2(config, frozenset(layer for layer, kind in enumerate(layer_types) if kind == MAMBA)),
    )
