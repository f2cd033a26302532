"""Qwen2-VL: a ViT with a rotary embedding of rows and columns, and the quick approximation of GELU."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.encoders.names import EncoderNames
from edgekv.spec.encoders.processor import read_heads
from edgekv.spec.encoders.qwen_vl import (
    EPS,
    FRAMES,
    in_sections,
    read_pictures,
    read_shapes,
    read_theta,
    read_width,
)
from edgekv.spec.vision import EncoderSpec, PictureSpec

MODEL_TYPES = ("qwen2_vl",)

_MODEL, _LAYER = "model.visual.", "model.visual.blocks.{layer}."

NAMES = EncoderNames(
    patches=_MODEL + "patch_embed.proj",
    positions="",
    attention_norm=_LAYER + "norm1",
    q=_LAYER + "attn.qkv",
    k=_LAYER + "attn.qkv",
    v=_LAYER + "attn.qkv",
    o=_LAYER + "attn.proj",
    feed_forward_norm=_LAYER + "norm2",
    fc1=_LAYER + "mlp.fc1",
    fc2=_LAYER + "mlp.fc2",
    last_norm=_MODEL + "merger.ln_q",
    projector=_MODEL + "merger.mlp.0",
    projector_out=_MODEL + "merger.mlp.2",
    frames=FRAMES,
)

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
    return EncoderSpec(
        model_type=config.text("model_type"),
        layers=vision.size("depth"),
        hidden=hidden,
        heads=heads,
        intermediate=vision.size("mlp_ratio") * hidden,
        image=shapes.square,
        patch=shapes.patch,
        merge=shapes.merge,
        output=read_width(config, vision, "hidden_size"),
        eps=EPS,
        max_patches=shapes.most * shapes.merge**2,
        rotary_theta=read_theta(vision),
        projector="mlp",
        projector_width=hidden * shapes.merge**2,
        feed_forward="quick",
    )


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
