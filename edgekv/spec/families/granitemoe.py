"""Granite 3 with experts (Granite-3.1-1B-A400M): its decoder with a mixture for every feed-forward."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import granite
from edgekv.spec.llama_like import experts

MODEL_TYPES = ("granitemoe",)

STORED_NAMES = (
    ("mlp.router", "block_sparse_moe.router.layer"),
    ("mlp.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
    ("mlp.experts.down_proj", "block_sparse_moe.output_linear.weight"),
)


def describe(config: Config) -> DecoderSpec:
    """Granite 3's decoder; a softmax over the chosen experts weighs them."""
    config = config.with_defaults(num_local_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-6)
    config.expect("mlp_bias", False)
    config.ignore("router_jitter_noise")  # of training
    spec = granite.describe(config)
    mixture = experts(config, range(spec.layers), count="num_local_experts", width="intermediate_size")
    return replace(spec, experts=mixture, fused=frozenset({"experts"}), stored_names=STORED_NAMES)
