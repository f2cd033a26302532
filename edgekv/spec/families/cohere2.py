"""Command R7B and Command A: Cohere's decoder with windows; layers with full attention are not rotated."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families.cohere import cohere
from edgekv.spec.llama_like import windows

MODEL_TYPES = ("cohere2",)

DEFAULTS = {"max_position_embeddings": 8192, "sliding_window": 4096, "tie_word_embeddings": True}
PATTERN = 4  # every fourth layer has full attention


def describe(config: Config) -> DecoderSpec:
    """Cohere's decoder (arXiv 2504.00698); a head has hidden_size / num_attention_heads elements."""
    config = config.with_defaults(**DEFAULTS)
    spec = cohere(config)
    if spec.head_dim * spec.heads != spec.hidden:
        raise config.refusal("head_dim", f"hidden_size / num_attention_heads = {spec.hidden / spec.heads:g}")
    pattern = config.size("sliding_window_pattern", PATTERN)
    layer_windows = windows(
        config, spec.layers, config.optional_size("sliding_window"), lambda layer: bool((layer + 1) % pattern)
    )
    full = (layer for layer, own in enumerate(layer_windows or (None,) * spec.layers) if own is None)
    return replace(spec, windows=layer_windows, unrotated=frozenset(full))
