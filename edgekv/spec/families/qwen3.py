"""Qwen3: a Llama that normalizes every head of queries and keys."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import qwen2
from edgekv.spec.llama_like import ATTENTION, llama_like

MODEL_TYPES = ("qwen3",)

DEFAULTS = {**qwen2.DEFAULTS, "head_dim": 128}


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with q and k norms (arXiv 2505.09388); windows as in Qwen2."""
    config.expect("hidden_act", "silu", "swish")
    config = config.with_defaults(**DEFAULTS)
    spec = llama_like(config)
    biased = ATTENTION if config.flag("attention_bias") else frozenset[str]()
    return replace(spec, qk_norm="head", biased=biased, windows=qwen2.sliding_windows(config, spec.layers))
