"""Falcon-H1: attention and Mamba-2 side by side in each layer, and factors of most projections."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import llama_like, mamba2

MODEL_TYPES = ("falcon_h1",)

STORED_NAMES = (
    ("model.norm.", "model.final_layernorm."),
    ("post_attention_layernorm", "pre_ff_layernorm"),
    ("mlp.", "feed_forward."),
    ("linear_attn.", "mamba."),
)
DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
INPUTS = ("in_proj_z", "values", "keys", "queries", "in_proj_a")
"""What `ssm_multipliers` multiply, in their order."""


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with Mamba-2 beside attention; the factors are maximal update parametrization's (2203.03466).

    Those of what attention and Mamba-2 read, and of keys, are in the scores or in the results behind them.
    """
    config = config.with_defaults(**DEFAULTS)
    config.expect("hidden_act", "silu", "swish")
    for name in ("attention_bias", "mlp_bias", "projectors_bias"):
        config.expect(name, False)
    spec = llama_like(config)
    width = config.optional_size("mamba_d_ssm", 1024)
    rule = mamba2(config, frozenset(range(spec.layers)), width)
    assert rule is not None, "all layers have it"
    norm = "first" if config.flag("mamba_norm_before_gate", True) else "gated"
    read, ssm = config.number("attention_in_multiplier", 1.0), config.number("ssm_in_multiplier", 1.0)
    gate, down = config.numbers("mlp_multipliers", 2) if "mlp_multipliers" in config else (1.0, 1.0)
    ones = (1.0,) * len(INPUTS)
    inputs = config.numbers("ssm_multipliers", len(INPUTS)) if "ssm_multipliers" in config else ones
    gains = {f"linear_attn.{name}": ssm * factor for name, factor in zip(INPUTS, inputs, strict=True)}
    gains |= {"self_attn.o_proj": read * config.number("attention_out_multiplier", 1.0)}
    gains |= {"linear_attn.out_proj": config.number("ssm_out_multiplier", 1.0), "mlp.gate_proj": gate}
    return replace(
        spec,
        embedding_gain=config.number("embedding_multiplier", 1.0),
        logits_gain=config.number("lm_head_multiplier", 1.0),
        query_gain=spec.query_gain * read**2 * config.number("key_multiplier", 1.0),
        gains=tuple((gains | {"mlp.down_proj": down}).items()),
        delta_rule=replace(rule, attends=True, norm=norm if config.flag("mamba_rms_norm") else None),
        stored_names=STORED_NAMES,
    )
