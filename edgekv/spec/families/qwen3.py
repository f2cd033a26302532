"""Qwen3: a Llama that normalizes every head of queries and keys."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families.qwen2 import sliding_windows
from edgekv.spec.llama_like import ATTENTION, llama_like

MODEL_TYPES = ("qwen3",)

HEAD_DIM = 128


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with q and k norms (arXiv 2505.09388); windows as in Qwen2."""
    config.expect("hidden_act", "silu")
    spec = llama_like(config, head_dim=HEAD_DIM)
    biased = ATTENTION if config.flag("attention_bias") else frozenset[str]()
    return replace(spec, qk_norm="head", biased=biased, windows=sliding_windows(config, spec.layers))
