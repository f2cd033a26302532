"""Llama 2, 3, 3.1 and 3.2, SmolLM2, and whatever else calls itself a Llama."""

from __future__ import annotations

from dataclasses import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION, MLP, llama_like

MODEL_TYPES = ("llama",)


def describe(config: Config) -> DecoderSpec:
    """The decoder that every other one is told from."""
    config.expect("hidden_act", "silu")
    config.expect("partial_rotary_factor", 1.0)
    biased = frozenset[str]()
    if config.flag("attention_bias"):
        biased |= ATTENTION
    if config.flag("mlp_bias"):
        biased |= MLP
    return replace(llama_like(config), biased=biased)
