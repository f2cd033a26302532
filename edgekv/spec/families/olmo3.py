"""OLMo 3: OLMo 2 with windows in three of four layers, and yarn in the others."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import olmo2
from edgekv.spec.llama_like import windows
from edgekv.spec.rope import Rope

MODEL_TYPES = ("olmo3",)

THETA = 5e5
WINDOW = 4096
PATTERN = 4  # every fourth layer has full attention


def describe(config: Config) -> DecoderSpec:
    """OLMo 2's decoder with attention windows; `rope_scaling` applies to the layers with full attention."""
    config = config.with_defaults(**olmo2.DEFAULTS, sliding_window=WINDOW)
    spec = olmo2.olmo(config, two_ropes=True)
    # As in transformers, `rope_theta` is that of the layers with full attention alone.
    rope, local_rope = Rope.pair(config, spec.head_dim, theta=config.number("rope_theta", THETA), local_theta=THETA)
    window = config.optional_size("sliding_window")
    layer_windows = windows(config, spec.layers, window, lambda layer: bool((layer + 1) % PATTERN))
    return replace(
        spec,
        rope=rope,
        local_rope=None if local_rope == rope or not layer_windows else local_rope,
        windows=layer_windows,
    )
