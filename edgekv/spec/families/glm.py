"""GLM-4 and GLM-Edge: a Llama with fused gates and biases, half of whose heads is rotated, in interleaved pairs."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION_INPUTS, llama_like, same_window

MODEL_TYPES = ("glm",)

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
}


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder (arXiv 2406.12793)."""
    config.expect("hidden_act", "silu", "swish")
    config = config.with_defaults(**DEFAULTS)
    spec = llama_like(config, partial=True)
    return replace(
        spec,
        pairs="interleaved",
        fused=frozenset({"mlp"}),
        biased=ATTENTION_INPUTS if config.flag("attention_bias", True) else frozenset[str](),
        windows=same_window(config, spec.layers, None),
    )
