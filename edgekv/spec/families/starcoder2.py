"""StarCoder 2: LayerNorm, biases, and GELU without a gate."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION, llama_like, same_window, with_layer_norms

MODEL_TYPES = ("starcoder2",)

DEFAULTS = {"num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True}
STORED_NAMES = (("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj"))


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with other norms and feed-forward (arXiv 2402.19173); a window for every layer, if any."""
    config.expect("hidden_act", "gelu_pytorch_tanh", "gelu_new")
    config.ignore("rms_norm_eps")
    config = config.with_defaults(**DEFAULTS)
    spec = replace(llama_like(config), activation="gelu-tanh", gated=False, stored_names=STORED_NAMES)
    biased = ATTENTION | {"mlp.up_proj", "mlp.down_proj"} if config.flag("use_bias", True) else frozenset[str]()
    spec = with_layer_norms(spec, config.number("norm_epsilon", 1e-5), biased)
    return replace(spec, windows=same_window(config, spec.layers, config.optional_size("sliding_window")))
