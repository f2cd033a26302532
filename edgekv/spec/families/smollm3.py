"""SmolLM3: a Llama in which every fourth layer has no rotary embedding."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import biases, llama_like, unrotated, windows

MODEL_TYPES = ("smollm3",)

DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
}
INTERVAL = 4  # every fourth layer is not rotated


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder, with layers without a rotary embedding."""
    config.expect("hidden_act", "silu", "swish")
    config = config.with_defaults(**DEFAULTS)
    spec = llama_like(config)
    still = unrotated(config, spec.layers, INTERVAL)
    window = config.optional_size("sliding_window")
    window = window if config.flag("use_sliding_window") else None
    return replace(
        spec,
        unrotated=still,
        biased=biases(config),
        windows=windows(config, spec.layers, window, lambda layer: window is not None and layer in still),
    )
