"""Gemma: Gemma 2 without norms behind its blocks, soft caps and windows."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION, llama_like, same_window

MODEL_TYPES = ("gemma",)

DEFAULTS = {"num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with GELU, norms 1+w and scaled embeddings (arXiv 2403.08295).

    `hidden_act` may be `gelu`, which the first files have and which means the approximation by tanh there too.
    """
    config.expect("hidden_act", "gelu_pytorch_tanh", "gelu")
    config.expect("use_bidirectional_attention", False)
    config = config.with_defaults(**DEFAULTS)
    spec = llama_like(config)
    return replace(
        spec,
        activation="gelu-tanh",
        biased=ATTENTION if config.flag("attention_bias") else frozenset[str](),
        windows=same_window(config, spec.layers, None),
        norm_offset=1.0,
        embedding_gain=spec.hidden**0.5,
    )
