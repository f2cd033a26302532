"""Qwen3-VL: a ViT with a rotary embedding of rows and columns, and mergers behind some of its layers (DeepStack)."""

from __future__ import annotations

import math

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.encoders.names import EncoderNames
from edgekv.spec.encoders.processor import BICUBIC, CLIP_DEVIATION, CLIP_MEAN, read_heads, read_normalization, read_side
from edgekv.spec.vision import EncoderSpec, PictureShapes, PictureSpec

MODEL_TYPES = ("qwen3_vl",)

_MODEL, _LAYER = "model.visual.", "model.visual.blocks.{layer}."
_DEEPSTACK = _MODEL + "deepstack_merger_list.{number}."

NAMES = EncoderNames(
    patches=_MODEL + "patch_embed.proj",
    positions=_MODEL + "pos_embed.weight",
    attention_norm=_LAYER + "norm1",
    q=_LAYER + "attn.qkv",
    k=_LAYER + "attn.qkv",
    v=_LAYER + "attn.qkv",
    o=_LAYER + "attn.proj",
    feed_forward_norm=_LAYER + "norm2",
    fc1=_LAYER + "mlp.linear_fc1",
    fc2=_LAYER + "mlp.linear_fc2",
    last_norm=_MODEL + "merger.norm",
    projector=_MODEL + "merger.linear_fc1",
    projector_out=_MODEL + "merger.linear_fc2",
    deepstack=(_DEEPSTACK + "norm", _DEEPSTACK + "linear_fc1", _DEEPSTACK + "linear_fc2"),
    frames=2,
)

_IMAGE_TOKEN = 151655
_MAX_ROWS = 256
"""Of a picture where the export names no sizes: 512 x 512 pixels. Checkpoints allow 16,384, beyond any phone."""
_SECTIONS = [24, 20, 20]
_EPS = 1e-6


def describe(config: Config, processor: Config) -> EncoderSpec:
    """The encoder of arXiv 2511.21631: interpolated positions, a rotary embedding of two axes, and DeepStack."""
    vision = _vision(config)
    vision.expect("hidden_act", "gelu_pytorch_tanh")
    vision.expect("in_channels", 3)
    vision.expect("temporal_patch_size", NAMES.frames)
    rope = vision.table("rope_parameters")
    rope.expect("rope_type", "axial", "default")
    layers, (heads, hidden) = vision.size("depth"), read_heads(vision, "num_heads", parts=4)
    side = read_side(vision, "num_position_embeddings", 2304)
    deepstack = _deepstack(vision, layers)
    width = config.text_decoder().size("hidden_size")
    if vision.size("out_hidden_size", 3584) != width:
        raise vision.refusal("out_hidden_size", f"{width}, the hidden_size of text_config")
    shapes = _shapes(vision, processor)
    return EncoderSpec(
        model_type=config.text("model_type"),
        layers=layers,
        hidden=hidden,
        heads=heads,
        intermediate=vision.size("intermediate_size"),
        image=math.isqrt(shapes.most) * shapes.step,
        patch=shapes.patch,
        merge=shapes.merge,
        output=width,
        eps=_EPS,
        table_side=side,
        interpolation="corners",
        most_patches=shapes.most * shapes.merge**2,
        rotary_theta=rope.number("rope_theta", 1e4),
        deepstack=deepstack,
        projector="mlp",
        projector_width=hidden * shapes.merge**2,
        projector_eps=_EPS,
    )


def pictures(config: Config, processor: Config) -> PictureSpec:
    """As transformers' `Qwen2VLImageProcessor` and `Qwen3VLProcessor` do it, for pictures of at most `_MAX_ROWS`.

    Args:
        config: the checkpoint's `config.json`.
        processor: its `preprocessor_config.json`.
    """
    vision = config.table("vision_config")
    shapes = _shapes(vision, processor)
    for name, size in (("patch_size", shapes.patch), ("merge_size", shapes.merge)):
        if (prepared_size := processor.size(name, size)) != size:
            raise processor.refusal(name, f"{size}, as config.json says", got=str(prepared_size))
    processor.expect("temporal_patch_size", NAMES.frames)
    mean, deviation = read_normalization(processor, BICUBIC, CLIP_MEAN, CLIP_DEVIATION)
    token = "<|image_pad|>"
    return PictureSpec(
        tiling="none",
        resample="bicubic",
        mean=mean,
        deviation=deviation,
        token=token,
        token_id=config.count("image_token_id", _IMAGE_TOKEN),
        begin="",
        whole="",
        end="",
        layout="joined",
        written=f"<|vision_start|>{token}<|vision_end|>",
        shapes=shapes,
    )


def decoder(config: Config, spec: DecoderSpec) -> DecoderSpec:
    """The decoder with rows of pictures behind its first layers, and with positions of three axes (interleaved mrope).

    Of the pairs of the rotary embedding the second of each three turns with the row, and the third with the column, as
    far as `mrope_section` says; all others turn with the place in the text.
    """
    vision, text = _vision(config), config.table("text_config")
    table = text.table("rope_scaling") or text.table("rope_parameters")
    table.expect("mrope_interleaved", True)
    sections = table.fields.get("mrope_section", _SECTIONS)
    pairs = spec.rope.width // 2
    is_list = isinstance(sections, list) and len(sections) == 3 and all(type(section) is int for section in sections)
    if not is_list or min(sections) < 0 or sum(sections) != pairs:
        raise table.refusal("mrope_section", f"three numbers, together {pairs}", got=str(sections)[:80])
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


def _shapes(vision: Config, processor: Config) -> PictureShapes:
    """How large a picture may be."""
    patch, merge = vision.edge("patch_size", 16), vision.size("spatial_merge_size", 2)
    size, step = processor.table("size"), patch * merge
    least = processor.size("min_pixels", size.size("shortest_edge", 56 * 56))
    most = processor.size("max_pixels", size.size("longest_edge", 28 * 28 * 1280))
    if most < max(step**2, least):
        raise size.refusal("longest_edge", f"at least {max(step**2, least)} pixels", got=str(most))
    rows = min(most // step**2, _MAX_ROWS)
    return PictureShapes(patch=patch, merge=merge, least=min(-(-least // step**2), rows), most=rows, split_above=4096.0)


def _deepstack(vision: Config, layers: int) -> tuple[int, ...]:
    numbers = vision.layers("deepstack_visual_indexes", layers)
    if [*numbers] != sorted({*numbers}):
        raise vision.refusal("deepstack_visual_indexes", "ascending numbers")
    return numbers
