"""Gemma 2: norms on both sides of each block, soft caps, and a window in every other layer."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION, llama_like, windows

MODEL_TYPES = ("gemma2",)

# Defaults of absent fields.
HEAD_DIM = 256
QUERY_SCALAR = 256.0
WINDOW = 4096
ATTENTION_CAP = 50.0
LOGITS_CAP = 30.0


def describe(config: Config) -> DecoderSpec:
    """The decoder of both generations, with soft caps and alternating windows (arXiv 2408.00118)."""
    config.expect("use_bidirectional_attention", False)
    spec = gemma(config, logits_cap=LOGITS_CAP)
    return replace(
        spec,
        attention_cap=config.optional_number("attn_logit_softcapping", ATTENTION_CAP),
        windows=windows(
            config, spec.layers, config.optional_size("sliding_window", WINDOW), lambda layer: layer % 2 == 0
        ),
    )


def gemma(config: Config, *, logits_cap: float | None = None) -> DecoderSpec:
    """A decoder of any generation, without windows.

    Norm weights are stored less 1, embeddings are multiplied by the root of their width, the gate's activation is
    GELU, and scores are scaled by `query_pre_attn_scalar` instead of head_dim.

    Args:
        config: the configuration.
        logits_cap: the generation's default.
    """
    config.expect("hidden_activation", "gelu_pytorch_tanh")
    spec = llama_like(config, head_dim=HEAD_DIM, tied_head=True)
    return replace(
        spec,
        activation="gelu-tanh",
        biased=ATTENTION if config.flag("attention_bias") else frozenset[str](),
        post_norms=True,
        norm_offset=1.0,
        embedding_gain=spec.hidden**0.5,
        query_gain=config.number("query_pre_attn_scalar", QUERY_SCALAR) ** -0.5,
        logits_cap=config.optional_number("final_logit_softcapping", logits_cap),
    )
