"""Nemotron-H, Nemotron Nano 2: layers with one of Mamba-2, attention and a feed-forward."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION, MLP, llama_like, mamba2

MODEL_TYPES = ("nemotron_h",)

FULL, MAMBA, FEED_FORWARD = "full_attention", "linear_attention", "mlp"
LETTERS = {"M": MAMBA, "*": FULL, "-": FEED_FORWARD, "E": "moe"}
STORED_NAMES = (
    ("model.embed_tokens.", "model.embeddings."),
    ("model.norm.", "model.norm_f."),
    *((name, "norm.") for name in ("input_layernorm.", "post_attention_layernorm.")),
    *((name, "mixer.") for name in ("self_attn.", "linear_attn.", "mlp.")),
)
DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "mamba_n_groups": 8}
DEFAULTS |= {"mamba_d_state": 128, "mamba_d_head": 64}
NAMES = {"mamba_n_heads": "mamba_num_heads", "mamba_d_head": "mamba_head_dim", "mamba_n_groups": "n_groups"}
NAMES |= {"mamba_d_state": "ssm_state_size", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder in parts, without a rotary embedding, and with the square of ReLU instead of a gate."""
    config = config.with_names(**NAMES).with_defaults(**DEFAULTS)
    config.expect("mlp_hidden_act", "relu2")
    for name, value in (("mamba_hidden_act", "silu"), ("use_bias", False), ("sliding_window", None)):
        config.expect(name, value)
    pattern, kinds = "hybrid_override_pattern", "layers_block_type"
    kinds_of_layers = config.layer_types(name=kinds) if kinds in config else tuple(config.text(pattern, ""))
    kinds_of_layers = tuple(LETTERS.get(kind, kind) for kind in kinds_of_layers)
    layers = frozenset(range(len(kinds_of_layers)))
    by_kind = {
        kind: frozenset(layer for layer in layers if kinds_of_layers[layer] == kind) for kind in LETTERS.values()
    }
    if set(kinds_of_layers) - {FULL, MAMBA, FEED_FORWARD} or not by_kind[FULL]:
        expected = "attention, mamba or mlp for each layer, one attention at least: graphs have no such experts"
        raise config.refusal(kinds if kinds in config else pattern, expected, got=", ".join(sorted({*kinds_of_layers})))
    config = config.changed(num_hidden_layers=len(kinds_of_layers))
    low = config.number("time_step_min", 1e-3)
    width = config.size("mamba_n_heads") * config.size("mamba_d_head")
    rule = mamba2(config.changed(time_step_limit=[low, float("inf")]), by_kind[MAMBA], width)
    biased = (ATTENTION if config.flag("attention_bias") else frozenset()) | (
        MLP - {"mlp.gate_proj"} if config.flag("mlp_bias") else frozenset()
    )
    return replace(
        llama_like(config.changed(rms_norm_eps=config.number("layer_norm_epsilon", 1e-5))),
        activation="relu2",
        gated=False,
        biased=biased,
        unrotated=layers,
        mixers_alone=by_kind[FULL] | by_kind[MAMBA],
        feed_forwards_alone=by_kind[FEED_FORWARD],
        delta_rule=rule,
        stored_names=STORED_NAMES,
    )
