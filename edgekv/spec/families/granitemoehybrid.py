"""Granite 4 without experts (H-Micro, H-1B, H-350M; Micro, 1B, 350M): Granite 3, and layers with Mamba-2."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import granite
from edgekv.spec.linear import DeltaRule

MODEL_TYPES = ("granitemoehybrid",)

FULL, MAMBA = "full_attention", "linear_attention"
STORED_NAMES = (
    ("mlp.gate_up_proj", "shared_mlp.input_linear"),
    ("mlp.down_proj", "shared_mlp.output_linear"),
    ("linear_attn.", "mamba."),
)
EXPERTS, INTERMEDIATE, KERNEL = 8, 1024, 4  # defaults of absent fields
HEADS = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_expand": 2, "mamba_conv_bias": True}
UNREAD = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_expand", "mamba_d_conv")
DENSE = "Take one without experts, such as granite-4.0-h-micro."


def describe(config: Config) -> DecoderSpec:
    """Granite 3's decoder, whose gates are fused. The feed-forward is what the architecture calls the shared expert."""
    if config.count("num_local_experts", EXPERTS):
        raise config.refusal("num_local_experts", "0: graphs have no experts beside a shared one", fix=DENSE)
    kinds = "layer_types" if "layer_types" in config else "layers_block_type"
    layers = config.size("num_hidden_layers")
    found = config.layer_types(layers, kinds) if kinds in config else (MAMBA,) * layers
    if set(found) - {FULL, MAMBA} or FULL not in found:
        raise config.refusal(kinds, "attention or mamba for each layer, one attention at least", got=", ".join(found))
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
        delta_rule=_mamba(config, frozenset(layer for layer, kind in enumerate(found) if kind == MAMBA)),
    )


def _mamba(config: Config, layers: frozenset[int]) -> DeltaRule | None:
    """Mamba-2 of these layers; None if there are none, whose sizes are then not read."""
    config = config.with_defaults(**HEADS)
    if not layers:
        config.ignore(*UNREAD, "mamba_conv_bias", "mamba_proj_bias", "time_step_limit")
        return None
    config.expect("mamba_proj_bias", False)
    heads, groups = config.size("mamba_n_heads"), config.size("mamba_n_groups")
    if heads % groups:
        raise config.refusal("mamba_n_heads", f"a multiple of mamba_n_groups = {groups}")
    width = config.size("mamba_expand") * config.size("hidden_size")
    config.ignore("mamba_d_head")
    if width % heads:
        raise config.refusal("mamba_n_heads", f"a divisor of mamba_expand * hidden_size = {width}")
    config.expect("mamba_d_head", width // heads, "auto")
    kernel = config.size("mamba_d_conv", KERNEL)
    if kernel < 2:
        raise config.refusal("mamba_d_conv", "a kernel of at least 2 tokens")
    return DeltaRule(
        layers,
        kernel,
        groups,
        heads,
        config.size("mamba_d_state"),
        width // heads,
        corrects=False,
        kernel_bias=config.flag("mamba_conv_bias"),
        step_limits=config.limits("time_step_limit"),
    )
