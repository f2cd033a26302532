"""Granite 3: a Llama with four multipliers."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import biases, llama_like, same_window

MODEL_TYPES = ("granite",)


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with multipliers of embeddings, scores, residual branches and logits, all folded into weights."""
    config.expect("hidden_act", "silu", "swish")
    config = config.with_defaults(max_position_embeddings=2048)
    spec = llama_like(config)
    return replace(
        spec,
        biased=biases(config),
        windows=same_window(config, spec.layers, None),
        embedding_gain=config.number("embedding_multiplier", 1.0),
        query_gain=config.number("attention_multiplier", 1.0),
        residual_gain=config.number("residual_multiplier", 1.0),
        logits_gain=1 / config.number("logits_scaling", 1.0),
    )
