"""OLMo 2: norms after each block instead of before it, and q and k norms over all heads together."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION, llama_like, same_window

MODEL_TYPES = ("olmo2",)

DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with the norms of arXiv 2501.00656."""
    spec = olmo(config)
    return replace(spec, windows=same_window(config, spec.layers, None))


def olmo(config: Config, *, two_ropes: bool = False) -> DecoderSpec:
    """A decoder of either generation, without windows; for `two_ropes` see `llama_like`."""
    config.expect("hidden_act", "silu", "swish")
    config.expect("clip_qkv", None)
    spec = llama_like(config.with_defaults(**DEFAULTS), two_ropes=two_ropes)
    biased = ATTENTION if config.flag("attention_bias") else frozenset[str]()
    return replace(spec, biased=biased, qk_norm="all-heads", pre_norms=False, post_norms=True)
