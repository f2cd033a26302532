"""Qwen2 and Qwen2.5: a Llama with biases on queries, keys and values."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION_INPUTS, llama_like, windows

MODEL_TYPES = ("qwen2",)

DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096}
FIRST_SLIDING = 28  # default of an absent field


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with biases (arXiv 2412.15115); windows as `sliding_windows` reads them."""
    config.expect("hidden_act", "silu", "swish")
    config.expect("use_mrope", False)
    config = config.with_defaults(**DEFAULTS)
    spec = llama_like(config)
    return replace(spec, biased=ATTENTION_INPUTS, windows=sliding_windows(config, spec.layers))


def sliding_windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """`sliding_window` from layer `max_window_layers` on, and only if `use_sliding_window` is true.

    Raises:
        CheckpointError: a field is wrong, or layers slide without a window.
    """
    window = config.optional_size("sliding_window")
    window = window if config.flag("use_sliding_window") else None
    first = config.count("max_window_layers", FIRST_SLIDING)
    return windows(config, layers, window, lambda layer: window is not None and layer >= first)
