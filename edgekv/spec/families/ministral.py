"""Ministral 8B: a Mistral in which some layers have a window."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import mistral
from edgekv.spec.llama_like import llama_like, windows

MODEL_TYPES = ("ministral",)


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with `sliding_window` in the layers that `layer_types` lists, by default in all."""
    config.expect("hidden_act", "silu", "swish")
    config = config.with_defaults(**mistral.DEFAULTS)
    spec = llama_like(config)
    window = config.optional_size("sliding_window")
    return replace(spec, windows=windows(config, spec.layers, window, lambda layer: window is not None))
