"""Hunyuan 0.5B to 7B: a Llama with q and k norms behind the rotary embedding."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION, llama_like, same_window
from edgekv.spec.rope import THETA

MODEL_TYPES = ("hunyuan_v1_dense",)

DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
STORED_NAMES = (("q_norm", "query_layernorm"), ("k_norm", "key_layernorm"))
ALPHA = ("type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with the norms and, if there is an `alpha`, with a larger base of the rotary embedding."""
    config.expect("hidden_act", "silu", "swish")
    config = config.with_defaults(**DEFAULTS)
    spec = llama_like(_with_alpha(config))
    return replace(
        spec,
        qk_norm="head",
        qk_norm_last=True,
        biased=ATTENTION if config.flag("attention_bias") else frozenset[str](),
        windows=same_window(config, spec.layers, None),
        stored_names=STORED_NAMES,
    )


def _with_alpha(config: Config) -> Config:
    """Files say `dynamic` of an embedding that does not depend on the length: theta * alpha ** (D / (D - 2))."""
    changed = {}
    for name in ("rope_scaling", "rope_parameters"):
        table = config.table(name)
        if table.text("rope_type", table.text("type", "")) == "dynamic" and table.zero_or_number("alpha"):
            dim = config.size("head_dim")
            if dim <= 2:
                raise config.refusal("head_dim", "more than 2 elements, beside alpha")
            table.ignore(*ALPHA)
            theta = table.number("rope_theta", config.number("rope_theta", THETA))
            theta *= table.number("alpha") ** (dim / (dim - 2))
            changed[name] = {"rope_type": "default", "rope_theta": theta}
    return config.changed(**changed)
