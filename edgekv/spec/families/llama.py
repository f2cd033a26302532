"""Llama 2, 3, 3.1 and 3.2, SmolLM2, and other models of type `llama`."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import biases, llama_like

MODEL_TYPES = ("llama",)


def describe(config: Config) -> DecoderSpec:
    """The decoder that all other families are variants of."""
    config.expect("hidden_act", "silu")
    config.expect("partial_rotary_factor", 1.0)
    return replace(llama_like(config), biased=biases(config))
