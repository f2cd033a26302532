"""OLMo 2: norms after each block instead of before it, and q and k norms over all heads together."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION, llama_like

MODEL_TYPES = ("olmo2",)

EPS = 1e-5


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with the norms of arXiv 2501.00656."""
    config.expect("hidden_act", "silu")
    config.expect("partial_rotary_factor", 1.0)
    config.expect("clip_qkv", None)
    spec = llama_like(config, eps=EPS)
    biased = ATTENTION if config.flag("attention_bias") else frozenset[str]()
    return replace(spec, biased=biased, qk_norm="all-heads", pre_norms=False, post_norms=True)
