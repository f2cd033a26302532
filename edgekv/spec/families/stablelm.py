"""StableLM 3B and StableLM 2: a Llama with LayerNorm, a quarter of whose heads is rotated."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec, Parallel
from edgekv.spec.llama_like import ATTENTION_INPUTS, llama_like, same_window, with_layer_norms

MODEL_TYPES = ("stablelm",)

DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 4096, "partial_rotary_factor": 0.25}


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with other norms (arXiv 2402.17834); attention and feed-forward may read one norm."""
    config.expect("hidden_act", "silu", "swish")
    config.expect("qk_layernorm", False)
    config.ignore("rms_norm_eps")
    config = config.with_defaults(**DEFAULTS)
    spec = llama_like(config, partial=True)
    biased = ATTENTION_INPUTS if config.flag("use_qkv_bias") else frozenset[str]()
    spec = with_layer_norms(spec, config.number("layer_norm_eps", 1e-5), biased)
    parallel: Parallel | None = "one-norm" if config.flag("use_parallel_residual") else None
    return replace(spec, parallel=parallel, windows=same_window(config, spec.layers, None))
