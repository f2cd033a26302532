"""OLMo: a Llama whose norms have no weights, and take the mean away."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION, llama_like, same_window

MODEL_TYPES = ("olmo",)

EPS = 1e-5


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder (arXiv 2402.00838)."""
    config.expect("hidden_act", "silu", "swish")
    config.expect("clip_qkv", None)
    config.ignore("rms_norm_eps")
    config = config.with_defaults(max_position_embeddings=2048)
    spec = llama_like(config)
    return replace(
        spec,
        eps=EPS,
        layer_norms=True,
        norm_weights=False,
        biased=ATTENTION if config.flag("attention_bias") else frozenset[str](),
        windows=same_window(config, spec.layers, None),
    )
