"""AFM (Arcee): a Llama whose feed-forward is the square of ReLU, without a gate."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import biases, llama_like, same_window

MODEL_TYPES = ("arcee",)

DEFAULTS = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with two matrices in the feed-forward (arXiv 2109.08668)."""
    config.expect("hidden_act", "relu2")
    config = config.with_defaults(**DEFAULTS)
    spec = llama_like(config)
    return replace(
        spec,
        activation="relu2",
        gated=False,
        biased=biases(config) - {"mlp.gate_proj"},
        windows=same_window(config, spec.layers, None),
    )
