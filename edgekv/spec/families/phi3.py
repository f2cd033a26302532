"""Phi-3, Phi-3.5 and Phi-4-mini: a Llama with fused matrices, whose heads may be rotated in part."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import llama_like, same_window

MODEL_TYPES = ("phi3",)

DEFAULTS = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with `qkv_proj` and `gate_up_proj` (arXiv 2404.14219); a window for every layer, if any."""
    config.expect("hidden_act", "silu", "swish")
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.expect(name, False)
    for name in ("full_attn_mod", "interpolate_factor"):
        config.expect(name, 1)
    config = config.with_defaults(**DEFAULTS)
    spec = llama_like(config, partial=True)
    if spec.rope.rope_type not in ("default", "longrope"):
        table = "rope_scaling" if "rope_scaling" in config else "rope_parameters"
        raise config.table(table).refusal("rope_type", "default or longrope", got=spec.rope.rope_type)
    windows = same_window(config, spec.layers, config.optional_size("sliding_window"))
    return replace(spec, fused=frozenset({"attention", "mlp"}), windows=windows)
