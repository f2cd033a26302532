"""Gemma 2: norms on both sides of each block, soft caps, and a window in every other layer."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION, llama_like, windows

MODEL_TYPES = ("gemma2",)

DEFAULTS = {
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA = {"head_dim": 256, "num_key_value_heads": 4, "query_pre_attn_scalar": 256.0, "tie_word_embeddings": True}


def describe(config: Config) -> DecoderSpec:
    """The decoder of both generations, with soft caps and alternating windows (arXiv 2408.00118)."""
    config = config.with_defaults(**DEFAULTS)
    config.expect("use_bidirectional_attention", False)
    spec = gemma(config)
    return replace(
        spec,
        attention_cap=config.optional_number("attn_logit_softcapping"),
        windows=windows(config, spec.layers, config.optional_size("sliding_window"), lambda layer: layer % 2 == 0),
    )


def gemma(config: Config, *, two_ropes: bool = False) -> DecoderSpec:
    """A decoder of any generation, without windows.

    Norm weights are stored less 1, embeddings are multiplied by the root of their width, the gate's activation is
    GELU, and scores are scaled by `query_pre_attn_scalar` instead of head_dim.

    Args:
        two_ropes: see `llama_like`.
    """
    config = config.with_defaults(**GEMMA)
    config.expect("hidden_activation", "gelu_pytorch_tanh")
    spec = llama_like(config, two_ropes=two_ropes)
    return replace(
        spec,
        activation="gelu-tanh",
        biased=ATTENTION if config.flag("attention_bias") else frozenset[str](),
        post_norms=True,
        norm_offset=1.0,
        embedding_gain=spec.hidden**0.5,
        query_gain=config.number("query_pre_attn_scalar") ** -0.5,
        logits_cap=config.optional_number("final_logit_softcapping"),
    )
