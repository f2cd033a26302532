"""Gemma 3: q and k norms, and a separate rotary embedding for layers with a window; alone or with a vision model."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families.gemma2 import gemma
from edgekv.spec.llama_like import text_config, windows
from edgekv.spec.rope import Rope

MODEL_TYPES = ("gemma3", "gemma3_text")

THETA = 1e6
LOCAL_THETA = 1e4
PATTERN = 6  # every sixth layer has full attention
DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
"""Published configurations omit fields with these values."""


def describe(config: Config) -> DecoderSpec:
    """Gemma's decoder with two rotary embeddings (arXiv 2503.19786); of a multimodal model the text decoder."""
    if config.text("model_type") == "gemma3":
        text = text_config(config, "gemma3_text")
        text.expect("final_logit_softcapping", None)  # transformers leaves it out beside a vision model
        text.expect("use_bidirectional_attention", False)  # it has another mask there
        return replace(describe(text), multimodal=True)
    config = config.with_defaults(**DEFAULTS)
    config.expect("attn_logit_softcapping", None)
    both_sides = config.flag("use_bidirectional_attention")
    spec = gemma(config, two_ropes=True)
    theta = config.number("rope_theta", THETA)
    local_theta = config.number("rope_local_base_freq", LOCAL_THETA)
    rope, local_rope = Rope.pair(config, spec.head_dim, theta=theta, local_theta=local_theta)
    pattern = config.size("sliding_window_pattern", PATTERN)
    window = config.optional_size("sliding_window")
    if both_sides and window is not None:
        window = window // 2 + 1  # of each side, with the token itself, as transformers has it
    layer_windows = windows(config, spec.layers, window, lambda layer: bool((layer + 1) % pattern))
    return replace(
        spec,
        qk_norm="head",
        rope=rope,
        local_rope=local_rope if layer_windows else None,
        windows=layer_windows,
        bidirectional=both_sides,
    )
