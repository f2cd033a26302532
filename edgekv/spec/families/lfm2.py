"""LFM2 and LFM2.5: short convolutions in most layers, attention with q and k norms in the others."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import convolution, llama_like

MODEL_TYPES = ("lfm2",)

EPS, KERNEL, MULTIPLE = 1e-5, 3, 256
DEFAULTS = {"intermediate_size": 12288, "num_key_value_heads": 8, "max_position_embeddings": 128_000, "rope_theta": 1e6}
STORED_NAMES = (
    ("model.norm.", "model.embedding_norm."),
    ("input_layernorm", "operator_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("q_norm", "q_layernorm"),
    ("k_norm", "k_layernorm"),
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
)


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with q and k norms, and gated convolutions in place of attention (arXiv 2511.23404)."""
    config = config.with_defaults(**DEFAULTS)
    eps = config.number("norm_eps", EPS)
    config.expect("rms_norm_eps", eps)
    spec = llama_like(config)
    return replace(
        spec,
        eps=eps,
        tied_head=config.flag("tie_embedding", config.flag("tie_word_embeddings", True)),
        intermediate=_feed_forward(config, spec.intermediate),
        qk_norm="head",
        convolution=convolution(config, spec.layers, KERNEL, _convolutions(config, spec.layers)),
        stored_names=STORED_NAMES,
    )


def _convolutions(config: Config, layers: int) -> frozenset[int]:
    """The layers that `full_attn_idxs` leaves out, for configurations without `layer_types`."""
    attention = config.layers("full_attn_idxs", layers) if "full_attn_idxs" in config else range(layers)
    return frozenset(range(layers)) - {*attention}


def _feed_forward(config: Config, size: int) -> int:
    """`block_ff_dim` overrides `intermediate_size`; by default two thirds of it, rounded up, are the width."""
    size = config.size("block_ff_dim", size)
    multiplier = config.optional_number("block_ffn_dim_multiplier", 1.0)
    multiple = config.size("block_multiple_of", MULTIPLE)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    if multiplier is None:
        return 2 * size // 3
    return -(-int(multiplier * (2 * size // 3)) // multiple) * multiple
