"""Qwen3-VL: a ViT with a rotary embedding of rows and columns, and mergers behind some of its layers (DeepStack)."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.encoders.processor import read_heads, read_side
from edgekv.spec.encoders.qwen_vl import (
    EPS,
    FRAMES,
    LAYER,
    MERGER_NAMES,
    MODEL,
    describe_encoder,
    read_pictures,
    read_sections,
    read_shapes,
)
from edgekv.spec.vision import EncoderSpec, PictureSpec

MODEL_TYPES = ("qwen3_vl",)

_DEEPSTACK = MODEL + "deepstack_merger_list.{number}."

NAMES = dataclasses.replace(
    MERGER_NAMES,
    positions=MODEL + "pos_embed.weight",
    fc1=LAYER + "mlp.linear_fc1",
    fc2=LAYER + "mlp.linear_fc2",
    last_norm=MODEL + "merger.norm",
    projector=MODEL + "merger.linear_fc1",
    projector_out=MODEL + "merger.linear_fc2",
    deepstack=(_DEEPSTACK + "norm", _DEEPSTACK + "linear_fc1", _DEEPSTACK + "linear_fc2"),
)

_PATCH = 16


def describe(config: Config, processor: Config) -> EncoderSpec:
    """The encoder of arXiv 2511.21631: interpolated positions, a rotary embedding of two axes, and DeepStack."""
    vision = _vision(config)
    vision.expect("hidden_act", "gelu_pytorch_tanh")
    vision.expect("in_channels", 3)
    vision.expect("temporal_patch_size", FRAMES)
    heads, hidden = read_heads(vision, "num_heads", parts=4)
    side = read_side(vision, "num_position_embeddings", 2304)
    deepstack = _deepstack(vision, vision.size("depth"))
    shapes = read_shapes(vision, processor, _PATCH)
    inner = vision.size("intermediate_size")
    spec = describe_encoder(
        config, vision, shapes, hidden=hidden, heads=heads, inner=inner, width_field="out_hidden_size"
    )
    return replace(spec, table_side=side, interpolation="corners", deepstack=deepstack, projector_eps=EPS)


def pictures(config: Config, processor: Config) -> PictureSpec:
    """As transformers' `Qwen2VLImageProcessor` and `Qwen3VLProcessor` do it, for pictures of limited rows.

    Args:
        config: the checkpoint's `config.json`.
        processor: its `preprocessor_config.json`.
    """
    return read_pictures(config, processor, read_shapes(config.table("vision_config"), processor, _PATCH))


def decoder(config: Config, spec: DecoderSpec) -> DecoderSpec:
    """The decoder with rows of pictures behind its first layers, and with positions of three axes (interleaved mrope).

    Of the pairs of the rotary embedding the second of each three turns with the row, and the third with the column, as
    far as `mrope_section` says; all others turn with the place in the text.
    """
    vision, text = _vision(config), config.table("text_config")
    table = text.table("rope_scaling") or text.table("rope_parameters")
    table.expect("mrope_interleaved", True)
    sections, pairs = read_sections(table, spec, (24, 20, 20)), spec.rope.width // 2
    axes = [0] * pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], pairs), 3):
            axes[pair] = axis
    count = len(_deepstack(vision, vision.size("depth")))
    if count > spec.layers:
        raise vision.refusal("deepstack_visual_indexes", f"at most {spec.layers}, the decoder's layers")
    return replace(spec, picture_layers=count, picture_axes=tuple(axes))


def _vision(config: Config) -> Config:
    """`vision_config`, whose sizes have the names of other architectures in some files."""
    vision = config.table("vision_config").with_names(depth="num_hidden_layers", num_heads="num_attention_heads")
    defaults = {"hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16}
    return vision.with_defaults(**defaults, deepstack_visual_indexes=[8, 16, 24])


def _deepstack(vision: Config, layers: int) -> tuple[int, ...]:
    numbers = vision.layers("deepstack_visual_indexes", layers)
    if [*numbers] != sorted({*numbers}):
        raise vision.refusal("deepstack_visual_indexes", "ascending numbers")
    return numbers
