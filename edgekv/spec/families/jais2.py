"""Jais 2: LayerNorm with biases, and the square of ReLU without a gate."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import MLP, biases, llama_like, same_window, with_layer_norms

MODEL_TYPES = ("jais2",)

DEFAULTS = {"max_position_embeddings": 8192, "attention_bias": True, "mlp_bias": True}


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with other norms, biases, and two matrices in the feed-forward."""
    config.expect("hidden_act", "relu2")
    config.ignore("rms_norm_eps")
    config = config.with_defaults(**DEFAULTS)
    spec = replace(llama_like(config), activation="relu2", gated=False)
    spec = with_layer_norms(spec, config.number("layer_norm_eps", 1e-5), biases(config) - (MLP & {"mlp.gate_proj"}))
    return replace(spec, windows=same_window(config, spec.layers, None))
