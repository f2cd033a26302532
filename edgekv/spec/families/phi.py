"""Phi-1, Phi-1.5 and Phi-2: LayerNorm, attention and GELU without a gate in parallel, biases everywhere."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION, llama_like, same_window, with_layer_norms

MODEL_TYPES = ("phi",)

DEFAULTS = {"max_position_embeddings": 2048, "partial_rotary_factor": 0.5}
STORED_NAMES = (
    ("model.norm.", "model.final_layernorm."),
    ("self_attn.o_proj", "self_attn.dense"),
    ("mlp.up_proj", "mlp.fc1"),
    ("mlp.down_proj", "mlp.fc2"),
)
BIASED = ATTENTION | {"mlp.up_proj", "mlp.down_proj", "lm_head"}


def describe(config: Config) -> DecoderSpec:
    """A decoder in parallel whose head has a bias too (arXiv 2309.05463)."""
    config.expect("hidden_act", "gelu_new", "gelu_pytorch_tanh")
    config.expect("qk_layernorm", False)
    config.ignore("rms_norm_eps")
    config = config.with_defaults(**DEFAULTS)
    spec = llama_like(config, partial=True)
    spec = replace(spec, activation="gelu-tanh", gated=False, parallel="one-norm", stored_names=STORED_NAMES)
    spec = with_layer_norms(spec, config.number("layer_norm_eps", 1e-5), BIASED)
    return replace(spec, windows=same_window(config, spec.layers, None))
