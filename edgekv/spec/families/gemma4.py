"""Gemma 4: two sizes of heads, layers that share a cache, and an input of its own for each layer and token."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families.gemma2 import gemma
from edgekv.spec.llama_like import cache_owners, layer_sizes, text_config, windows, with_gemma4_layers

MODEL_TYPES = ("gemma4", "gemma4_text")

HEAD_DIM = 512  # of layers with full attention
DEFAULTS = {"max_position_embeddings": 131_072, "sliding_window": 512}
PATTERN = 6  # every sixth layer has full attention, and so has the last
ROPE = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def describe(config: Config) -> DecoderSpec:
    """The text decoder of E2B and E4B, alone or with encoders of images and sound, which are left out."""
    if config.text("model_type") == "gemma4":
        return replace(describe(text_config(config, "gemma4_text")), multimodal=True)
    config.expect("enable_moe_block", False)
    config.expect("attention_k_eq_v", False)
    if "use_bidirectional_attention" in config:
        config.expect("use_bidirectional_attention", "vision")  # of the tokens of images alone
    config = config.with_defaults(**DEFAULTS).with_filled(rope_parameters=ROPE)
    spec = gemma(config, two_ropes=True)
    layers, window = spec.layers, config.optional_size("sliding_window")
    layer_windows = windows(config, layers, window, lambda layer: layer + 1 < layers and bool((layer + 1) % PATTERN))
    if layer_windows and layer_windows[-1] is not None:
        raise config.refusal("layer_types", "full_attention in the last layer", got="sliding_attention")
    is_full = [not layer_window for layer_window in layer_windows] or [True] * layers
    owners = cache_owners(config, is_full)
    sizes = layer_sizes(config, spec, is_full, owners, HEAD_DIM)
    if width := config.count("hidden_size_per_layer_input", 256):
        config.expect("vocab_size_per_layer_input", spec.vocab)
    config.ignore("vocab_size_per_layer_input")
    theta = config.number("rope_theta", 1e6)
    spec = with_gemma4_layers(config, spec, layer_windows, sizes, theta=theta, local_theta=theta)
    return replace(spec, cache_owners=owners, layer_inputs=width)
