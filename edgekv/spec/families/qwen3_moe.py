"""Qwen3 with experts (Qwen3-30B-A3B): its decoder with a mixture for some feed-forwards or all."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import qwen3
from edgekv.spec.llama_like import experts

MODEL_TYPES = ("qwen3_moe",)

DEFAULTS = {
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
STORED_NAMES = (("mlp.router", "mlp.gate"),)


def describe(config: Config) -> DecoderSpec:
    """Qwen3's decoder; layers of `mlp_only_layers`, and those between `decoder_sparse_step`, have one feed-forward."""
    count = "num_local_experts" if "num_local_experts" in config else "num_experts"
    config = config.with_defaults(**DEFAULTS).with_filled(**{count: 128})
    if "head_dim" not in config:
        config = config.with_filled(head_dim=config.size("hidden_size") // config.size("num_attention_heads"))
    spec = qwen3.describe(config)
    step = config.size("decoder_sparse_step", 1)
    dense = config.layers("mlp_only_layers", spec.layers) if "mlp_only_layers" in config else ()
    layers = [layer for layer in range(spec.layers) if layer not in dense and (layer + 1) % step == 0]
    if not layers:
        raise config.refusal("decoder_sparse_step", "at least one layer with experts", fix="Its type is qwen3 then.")
    mixture = experts(config, layers, count=count, normalized=config.flag("norm_topk_prob"))
    return replace(spec, experts=mixture, stored_names=STORED_NAMES)
