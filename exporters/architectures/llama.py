"""Llama 2, 3, 3.1 and 3.2, SmolLM2, and whatever else calls itself a Llama."""

from __future__ import annotations

from dataclasses import replace

from exporters.architectures.shared import ATTENTION, MLP, plain
from exporters.config import Config
from exporters.spec import DecoderSpec


def describe(config: Config) -> DecoderSpec:
    """The decoder that every other one is told from."""
    config.expect("hidden_act", "silu")
    config.expect("partial_rotary_factor", 1.0)
    biased = frozenset[str]()
    if config.flag("attention_bias"):
        biased |= ATTENTION
    if config.flag("mlp_bias"):
        biased |= MLP
    return replace(plain(config), biased=biased)
