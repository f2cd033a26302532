"""Qwen2-VL: a ViT with a rotary embedding of rows and columns, and the quick approximation of GELU."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.encoders.processor import read_heads
from edgekv.spec.encoders.qwen_vl import FRAMES, MERGER_NAMES, describe_encoder, in_sections, read_pictures, read_shapes
from edgekv.spec.vision import EncoderSpec, PictureSpec

MODEL_TYPES = ("qwen2_vl",)

NAMES = MERGER_NAMES

_PATCH = 14


def describe(config: Config, processor: Config) -> EncoderSpec:
    """The encoder of arXiv 2409.12191: a rotary embedding of two axes, for pictures of any shape."""
    vision = _vision(config)
    vision.expect("hidden_act", "quick_gelu")
    vision.expect("in_channels", 3)
    vision.expect("in_chans", 3)
    vision.expect("temporal_patch_size", FRAMES)
    vision.ignore("spatial_patch_size")  # patch_size
    heads, hidden = read_heads(vision, "num_heads", width="embed_dim", parts=4)
    shapes = read_shapes(vision, processor, _PATCH)
    inner = vision.size("mlp_ratio") * hidden
    spec = describe_encoder(config, vision, shapes, hidden=hidden, heads=heads, inner=inner, width_field="hidden_size")
    return replace(spec, feed_forward="quick")


def pictures(config: Config, processor: Config) -> PictureSpec:
    """As transformers' `Qwen2VLImageProcessor` and `Qwen2VLProcessor` do it, for pictures of limited rows.

    Args:
        config: the checkpoint's `config.json`.
        processor: its `preprocessor_config.json`.
    """
    return read_pictures(config, processor, read_shapes(_vision(config), processor, _PATCH))


def decoder(config: Config, spec: DecoderSpec) -> DecoderSpec:
    """The decoder with positions of three axes, in sections."""
    return replace(spec, picture_axes=in_sections(config, spec))


def _vision(config: Config) -> Config:
    vision = config.table("vision_config").with_names(depth="num_hidden_layers", num_heads="num_attention_heads")
    return vision.with_defaults(embed_dim=1280, depth=32, num_heads=16, mlp_ratio=4)
