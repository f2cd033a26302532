"""EmbeddingGemma 2: Gemma 4's layers with attention to both sides, whose inputs are made of embeddings alone."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families.gemma2 import gemma
from edgekv.spec.llama_like import layer_sizes, text_config, windows, with_gemma4_layers

MODEL_TYPES = ("embedding_gemma2", "embedding_gemma2_text")

DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 262_144,
    "sliding_window": 512,
}
PATTERN = 6  # every sixth layer has full attention, and so has the last
ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
STORED_NAMES = (
    ("model.per_layer_", "model.ple.per_layer_"),
    (".per_layer_input_gate", ".ple_block.per_layer_input_gate"),
    (".per_layer_projection.", ".ple_block.per_layer_projection."),
    (".post_per_layer_input_norm", ".ple_block.post_per_layer_input_norm"),
)


def describe(config: Config) -> DecoderSpec:
    """The text model, alone or with encoders of images and sound, which are left out."""
    if config.text("model_type") == "embedding_gemma2":
        return replace(describe(text_config(config, "embedding_gemma2_text")), multimodal=True)
    config = config.with_defaults(**DEFAULTS).with_filled(rope_parameters=ROPE)
    spec = gemma(config, two_ropes=True)
    layers, radius = spec.layers, config.size("sliding_window")
    pattern = config.size("sliding_window_pattern", PATTERN)
    layer_windows = windows(config, layers, radius + 1, lambda at: at + 1 < layers and bool((at + 1) % pattern))
    is_full = [not layer_window for layer_window in layer_windows] or [True] * layers
    own = {"head_dim": config.size("global_head_dim", 512)}
    own["num_key_value_heads"] = config.size("num_global_key_value_heads", 1)
    config = config.with_filled(per_layer_config={str(layer): own for layer in range(layers) if is_full[layer]})
    sizes = layer_sizes(config, spec, is_full, (), own["head_dim"])
    spec = with_gemma4_layers(config, spec, layer_windows, sizes, theta=1e6, local_theta=1e4)
    return replace(
        spec,
        layer_inputs=config.size("hidden_size_per_layer_input", 512),
        layer_table=False,
        stored_names=STORED_NAMES,
        bidirectional=True,
        outputs=config.size("embedding_dim", 768),
    )
