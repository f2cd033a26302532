"""Qwen2.5-VL: a ViT with RMS norms and gated feed-forwards, most of whose layers attend within windows."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.encoders.processor import read_heads
from edgekv.spec.encoders.qwen_vl import (
    FRAMES,
    LAYER,
    MERGER_NAMES,
    describe_encoder,
    in_sections,
    read_pictures,
    read_shapes,
)
from edgekv.spec.vision import EncoderSpec, PictureShapes, PictureSpec

MODEL_TYPES = ("qwen2_5_vl",)

NAMES = dataclasses.replace(
    MERGER_NAMES, fc1=LAYER + "mlp.gate_proj", up=LAYER + "mlp.up_proj", fc2=LAYER + "mlp.down_proj"
)


def describe(config: Config, processor: Config) -> EncoderSpec:
    """The encoder of arXiv 2502.13923: a rotary embedding of two axes, and windows in most layers."""
    vision = _vision(config)
    vision.expect("hidden_act", "silu")
    vision.expect("in_channels", 3)
    vision.expect("in_chans", 3)
    vision.expect("temporal_patch_size", FRAMES)
    vision.ignore("spatial_patch_size", "tokens_per_second")  # the first is patch_size, the second is of videos
    heads, hidden = read_heads(vision, "num_heads", parts=4)
    shapes = _shapes(vision, processor)
    inner = vision.size("intermediate_size")
    spec = describe_encoder(
        config, vision, shapes, hidden=hidden, heads=heads, inner=inner, width_field="out_hidden_size"
    )
    return replace(
        spec,
        window=shapes.window,
        windows=shapes.windows,
        full_layers=tuple(sorted({*vision.layers("fullatt_block_indexes", spec.layers)})),
        feed_forward="gated",
        rms_norms=True,
    )


def pictures(config: Config, processor: Config) -> PictureSpec:
    """As transformers' `Qwen2VLImageProcessor` and `Qwen2_5_VLProcessor` do it, for pictures of limited rows.

    Args:
        config: the checkpoint's `config.json`.
        processor: its `preprocessor_config.json`.
    """
    return read_pictures(config, processor, _shapes(_vision(config), processor))


def decoder(config: Config, spec: DecoderSpec) -> DecoderSpec:
    """The decoder with positions of three axes, in sections."""
    return replace(spec, picture_axes=in_sections(config, spec))


def _vision(config: Config) -> Config:
    vision = config.table("vision_config").with_names(depth="num_hidden_layers", num_heads="num_attention_heads")
    defaults = {"hidden_size": 3584, "intermediate_size": 3420, "depth": 32, "num_heads": 16}
    return vision.with_defaults(**defaults, fullatt_block_indexes=[7, 15, 23, 31])


def _shapes(vision: Config, processor: Config) -> PictureShapes:
    return read_shapes(vision, processor, 14, vision.size("window_size", 112))
