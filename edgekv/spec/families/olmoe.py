"""OLMoE: a Llama with q and k norms over all heads, and a mixture of experts for every feed-forward."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION, experts, llama_like

MODEL_TYPES = ("olmoe",)

DEFAULTS = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8}
STORED_NAMES = (("mlp.router", "mlp.gate"),)


def describe(config: Config) -> DecoderSpec:
    """The decoder of arXiv 2409.02060; without `norm_topk_prob`, a softmax over all experts weighs the chosen ones."""
    config.expect("hidden_act", "silu", "swish")
    config.expect("clip_qkv", None)
    config = config.with_defaults(**DEFAULTS)
    spec = llama_like(config)
    normalized = config.flag("norm_topk_prob")
    mixture = experts(config, range(spec.layers), count="num_experts", width="intermediate_size", normalized=normalized)
    biased = ATTENTION if config.flag("attention_bias") else frozenset[str]()
    return replace(spec, biased=biased, qk_norm="all-heads", experts=mixture, stored_names=STORED_NAMES)
