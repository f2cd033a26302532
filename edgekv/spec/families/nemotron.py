"""Nemotron 3 and 4, Minitron: LayerNorm 1+w, and the square of ReLU without a gate."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import MLP, biases, llama_like, same_window, with_layer_norms

MODEL_TYPES = ("nemotron",)

DEFAULTS = {"max_position_embeddings": 4096, "partial_rotary_factor": 0.5}


def describe(config: Config) -> DecoderSpec:
    """A decoder whose heads are rotated in part (arXiv 2402.16819)."""
    config.expect("hidden_act", "relu2")
    config.ignore("rms_norm_eps")
    config = config.with_defaults(**DEFAULTS)
    spec = replace(llama_like(config, partial=True), activation="relu2", gated=False, norm_offset=1.0)
    spec = with_layer_norms(spec, config.number("norm_eps", 1e-5), biases(config) - (MLP & {"mlp.gate_proj"}))
    return replace(spec, windows=same_window(config, spec.layers, None))
