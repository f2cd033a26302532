"""Llama 4's decoder without experts (MobileLLM-R1): q and k norms without weights in rotated layers."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION, llama_like, unrotated

MODEL_TYPES = ("llama4_text",)

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
DEFAULTS |= {"rope_theta": 5e5, "intermediate_size_mlp": 16384, "attention_chunk_size": 8192}
INTERVAL = 4  # every fourth layer is not rotated
STORED_NAMES = (("mlp.", "feed_forward."),)
CHUNKED = "chunked_attention"


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with interleaved pairs and unrotated layers.

    Contexts are bounded by the chunks that layers attend within, and by the position from which queries are scaled.
    """
    config.expect("hidden_act", "silu", "swish")
    config = config.with_defaults(**DEFAULTS)
    layers, step = config.size("num_hidden_layers"), config.count("interleave_moe_layer_step", 1)
    listed = config.layers("moe_layers", layers) if "moe_layers" in config else range(step - 1, layers, step or 1)
    if len(listed):
        raise config.refusal(
            "moe_layers", "no layers: graphs have no experts of this kind", fix="Take a dense MobileLLM-R1."
        )
    spec = llama_like(config.changed(intermediate_size=config.size("intermediate_size_mlp")))
    config.ignore("intermediate_size", "num_local_experts", "num_experts_per_tok", "router_jitter_noise")
    still = unrotated(config, layers, INTERVAL)
    bounds = {spec.bound_by: spec.max_positions}
    kinds = config.layer_types(layers) if "layer_types" in config else (CHUNKED,)
    if not {*kinds} <= {CHUNKED, "full_attention"}:
        raise config.refusal("layer_types", f"{CHUNKED} or full_attention for each layer")
    if CHUNKED in kinds and (chunk := config.optional_size("attention_chunk_size")) is not None:
        bounds["attention_chunk_size"] = chunk
    config.ignore("attn_scale")
    if config.flag("attn_temperature_tuning", True) and still:
        bounds["floor_scale (from it on, attn_temperature_tuning)"] = max(1, config.size("floor_scale", 8192) - 1)
    else:
        config.ignore("floor_scale")
    bound_by = min(bounds, key=lambda name: bounds[name])
    return replace(
        spec,
        max_positions=bounds[bound_by],
        bound_by=bound_by,
        pairs="interleaved",
        unrotated=still,
        qk_norm="head" if config.flag("use_qk_norm", True) else None,
        qk_norm_last=True,
        qk_norm_rotated=True,
        qk_norm_weights=False,
        biased=ATTENTION if config.flag("attention_bias") else frozenset[str](),
        stored_names=STORED_NAMES,
    )
