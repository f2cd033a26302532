"""Command R and Aya: attention and feed-forward read the result of one norm, which takes the mean away."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION, llama_like, same_window

MODEL_TYPES = ("cohere",)

DEFAULTS = {"max_position_embeddings": 8192, "rope_theta": 5e5, "tie_word_embeddings": True}


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder in parallel, with interleaved pairs and a scale of logits; without q and k norms."""
    config.expect("use_qk_norm", False)
    spec = cohere(config.with_defaults(**DEFAULTS))
    return replace(spec, windows=same_window(config, spec.layers, None))


def cohere(config: Config) -> DecoderSpec:
    """A decoder of either generation, without windows."""
    config.expect("hidden_act", "silu", "swish")
    config.ignore("rms_norm_eps")
    spec = llama_like(config)
    return replace(
        spec,
        eps=config.number("layer_norm_eps", 1e-5),
        layer_norms=True,
        parallel="one-norm",
        pairs="interleaved",
        biased=ATTENTION if config.flag("attention_bias") else frozenset[str](),
        logits_gain=config.number("logit_scale", 0.0625),
    )
