"""Llama 2, 3, 3.1 and 3.2, SmolLM2, and other models of type `llama`."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import biases, llama_like, same_window

MODEL_TYPES = ("llama",)

OFF = ("rope_interleaved", "use_resampler", "qk_layer_norms")  # fields of SmolLM2 and of SmolVLM's text model


def describe(config: Config) -> DecoderSpec:
    """The decoder that all other families are variants of."""
    config.expect("hidden_act", "silu", "swish")
    for name in OFF:
        config.expect(name, False)
    config = config.with_defaults(max_position_embeddings=2048)
    spec = llama_like(config)
    return replace(spec, biased=biases(config), windows=same_window(config, spec.layers, None))
