"""LFM3: LFM2 with wider convolutions, attention windows, gates of heads, and norms on both sides of each block."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import convolution, llama_like, windows
from edgekv.spec.rope import Rope

MODEL_TYPES = ("lfm3",)

EPS, THETA, KERNEL = 1e-5, 1e6, 7
DEFAULTS = {"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 256, "tie_word_embeddings": True}
ROPE = {
    "full_attention": {"rope_type": "proportional", "rope_theta": THETA, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
STORED_NAMES = (
    ("model.norm.", "model.embedding_norm."),
    ("input_layernorm", "operator_norm"),
    ("post_attention_layernorm", "post_operator_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffn_norm"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
)


def describe(config: Config) -> DecoderSpec:
    """Convolutions, and from the third layer on, by turns full attention and attention in a window."""
    config.expect("use_sandwich_norm", True)
    config.expect("attention_bias", False)
    config = config.with_defaults(**DEFAULTS, max_position_embeddings=128_000).with_filled(rope_parameters=ROPE)
    eps = config.number("norm_eps", config.number("rms_norm_eps", EPS))
    config.expect("rms_norm_eps", eps)
    spec = replace(llama_like(config, two_ropes=True), eps=eps)
    layers, window = spec.layers, config.optional_size("sliding_window")
    theta = config.number("rope_theta", THETA)
    rope, local_rope = Rope.pair(config, spec.head_dim, theta=theta, local_theta=theta)
    attention = frozenset(layer for layer in range(layers) if layer and layer % 2 == 0)
    layer_windows = windows(
        config, layers, window, lambda layer: layer in attention and layer % 4 == 0, others=("conv",)
    )
    return replace(
        spec,
        qk_norm="head",
        post_norms=True,
        rope=rope,
        local_rope=local_rope if layer_windows else None,
        windows=layer_windows,
        head_gates=config.flag("use_attention_gate", True),
        convolution=convolution(config, layers, KERNEL, frozenset(range(layers)) - attention),
        stored_names=STORED_NAMES,
    )
