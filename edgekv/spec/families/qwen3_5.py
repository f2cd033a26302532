"""Qwen3.5: gated delta rules in most layers, attention with a gate for every channel in the others."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.linear import DeltaRule
from edgekv.spec.llama_like import llama_like, text_config

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")

FULL, LINEAR = "full_attention", "linear_attention"
INTERVAL = 4  # every fourth layer has attention
DEFAULTS = {"head_dim": 256, "num_key_value_heads": 4, "max_position_embeddings": 32_768, "partial_rotary_factor": 0.25}
HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 32}


def describe(config: Config) -> DecoderSpec:
    """Gated delta rules (arXiv 2412.06464) and gated attention (arXiv 2505.06708); of a multimodal model the text part.

    The sections of its rotary embedding (`mrope_section`) all have the same position where there is only text.
    """
    if config.text("model_type") == "qwen3_5":
        text = text_config(config, "qwen3_5_text", tied=False)
        return replace(describe(text), multimodal=True)
    config.expect("hidden_act", "silu", "swish")
    config.expect("attention_bias", False)
    config.expect("attn_output_gate", True)
    config = config.with_defaults(**DEFAULTS, **HEADS)
    spec = llama_like(config, partial=True)
    for name in ("rope_scaling", "rope_parameters"):
        config.table(name).ignore("mrope_section", "mrope_interleaved")
    rule = _delta_rule(config, spec.layers)
    return replace(spec, norm_offset=1.0, qk_norm="head", output_gates=True, delta_rule=rule)


def _delta_rule(config: Config, layers: int) -> DeltaRule | None:
    interval = config.size("full_attention_interval", INTERVAL)
    kinds = [LINEAR if (layer + 1) % interval else FULL for layer in range(layers)]
    if "layer_types" in config:
        kinds = [*config.layer_types(layers)]
    if set(kinds) - {FULL, LINEAR} or FULL not in kinds:
        raise config.refusal("layer_types", f"{FULL} or {LINEAR} for each layer, one {FULL} at least", got=f"{kinds}")
    kernel, key_heads = config.size("linear_conv_kernel_dim", 4), config.size("linear_num_key_heads", 16)
    if kernel < 2:
        raise config.refusal("linear_conv_kernel_dim", "a kernel of at least 2 tokens")
    value_heads = config.size("linear_num_value_heads")
    if value_heads % key_heads:
        raise config.refusal("linear_num_value_heads", f"a multiple of linear_num_key_heads = {key_heads}")
    key_dim, value_dim = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
    chosen = frozenset(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
    return DeltaRule(chosen, kernel, key_heads, value_heads, key_dim, value_dim) if chosen else None
