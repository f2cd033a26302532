"""Granite 3 and 4 (dense): a Llama with four multipliers."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import biases, llama_like

MODEL_TYPES = ("granite",)


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with multipliers of embeddings, scores, residual branches and logits, all folded into weights."""
    config.expect("hidden_act", "silu")
    return replace(
        llama_like(config),
        biased=biases(config),
        embedding_gain=config.number("embedding_multiplier", 1.0),
        query_gain=config.number("attention_multiplier", 1.0),
        residual_gain=config.number("residual_multiplier", 1.0),
        logits_gain=1 / config.number("logits_scaling", 1.0),
    )
