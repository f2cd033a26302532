"""Phi-3, Phi-3.5 and Phi-4-mini: a Llama with fused matrices, whose heads may be rotated in part."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import llama_like, same_window

MODEL_TYPES = ("phi3",)

EPS = 1e-5  # default of an absent field


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with `qkv_proj` and `gate_up_proj` (arXiv 2404.14219); a window for every layer, if any."""
    config.expect("hidden_act", "silu")
    config.expect("attention_bias", False)
    spec = llama_like(config, eps=EPS)
    windows = same_window(config, spec.layers, config.optional_size("sliding_window"))
    return replace(spec, fused=frozenset({"attention", "mlp"}), windows=windows)
