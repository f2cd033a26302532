"""EXAONE 4: norms after each block, q and k norms, and no rotary embedding in layers with full attention."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import llama_like, windows

MODEL_TYPES = ("exaone4",)

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
}
PATTERN = 4  # every fourth layer has full attention


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with the norms and the attention of arXiv 2507.11407; without windows every layer is rotated."""
    config.expect("hidden_act", "silu", "swish")
    config = config.with_defaults(**DEFAULTS)
    spec = llama_like(config)
    window = config.optional_size("sliding_window")
    config.ignore("sliding_window_pattern")
    pattern = config.size("sliding_window_pattern", PATTERN) if "layer_types" not in config else PATTERN
    layer_windows = windows(
        config, spec.layers, window, lambda layer: window is not None and bool((layer + 1) % pattern)
    )
    full = (layer for layer, own in enumerate(layer_windows or (None,) * spec.layers) if own is None)
    return replace(
        spec,
        qk_norm="head",
        pre_norms=False,
        post_norms=True,
        windows=layer_windows,
        unrotated=frozenset(full) if window is not None else frozenset[int](),
    )
