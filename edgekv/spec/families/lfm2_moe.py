"""LFM2 with experts (LFM2-8B-A1B): its decoder with a mixture for all but the first feed-forwards."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import lfm2
from edgekv.spec.llama_like import experts

MODEL_TYPES = ("lfm2_moe",)

DEFAULTS = {
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "block_auto_adjust_ff_dim": False,
}
STORED_NAMES = (
    ("mlp.router.weight", "feed_forward.gate.weight"),
    ("mlp.router.correction", "feed_forward.expert_bias"),
    *lfm2.STORED_NAMES,
    ("mlp.experts", "feed_forward.experts"),
    (".gate_proj.", ".w1."),
    (".up_proj.", ".w3."),
    (".down_proj.", ".w2."),
)


def describe(config: Config) -> DecoderSpec:
    """LFM2's decoder; sigmoids weigh experts, and choose them together with a stored correction."""
    config = config.with_defaults(**DEFAULTS)
    spec = lfm2.describe(config)
    dense = config.count("num_dense_layers", 2)
    if dense >= spec.layers:
        raise config.refusal(
            "num_dense_layers", f"fewer than num_hidden_layers = {spec.layers}", fix="It is lfm2 then."
        )
    normalized = config.flag("norm_topk_prob", True)
    mixture = replace(
        experts(config, range(dense, spec.layers), count="num_experts", normalized=normalized),
        score="sigmoid",
        corrected=config.flag("use_expert_bias", True),
        gain=config.number("routed_scaling_factor", 1.0),
    )
    return replace(spec, experts=mixture, stored_names=STORED_NAMES)
