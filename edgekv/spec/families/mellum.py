"""Mellum 2: Qwen3 with experts and attention windows, and a rotary embedding for each kind of attention."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families.qwen3_moe import STORED_NAMES
from edgekv.spec.llama_like import ATTENTION, experts, llama_like, windows
from edgekv.spec.rope import Rope

MODEL_TYPES = ("mellum",)

THETA, LOCAL_THETA = 5e5, 1e4
KINDS, SPARSE, DENSE = "mlp_layer_types", "sparse", "dense"
DEFAULTS = {
    "intermediate_size": 7168,
    "moe_intermediate_size": 896,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "norm_topk_prob": True,
}


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with q and k norms; the layers that `mlp_layer_types` calls sparse have experts."""
    count = "num_local_experts" if "num_local_experts" in config else "num_experts"
    config = config.with_defaults(**DEFAULTS).with_filled(**{count: 64})
    config.expect("hidden_act", "silu", "swish")
    spec = llama_like(config, two_ropes=True)
    feed_forwards = config.texts(KINDS, spec.layers) if KINDS in config else (SPARSE,) * spec.layers
    sparse = [layer for layer, kind in enumerate(feed_forwards) if kind == SPARSE]
    if set(feed_forwards) - {SPARSE, DENSE} or not sparse:
        raise config.refusal(
            KINDS, f"{SPARSE} or {DENSE} for each layer, one {SPARSE} at least", got=", ".join(feed_forwards)
        )
    window = config.optional_size("sliding_window", 1024)
    layer_windows = windows(config, spec.layers, window, lambda layer: False)
    rope, local_rope = Rope.pair(config, spec.head_dim, theta=THETA, local_theta=LOCAL_THETA)
    return replace(
        spec,
        rope=rope,
        local_rope=local_rope if layer_windows and local_rope != rope else None,
        windows=layer_windows,
        qk_norm="head",
        biased=ATTENTION if config.flag("attention_bias") else frozenset(),
        experts=experts(config, sparse, count=count, normalized=config.flag("norm_topk_prob")),
        stored_names=STORED_NAMES,
    )
