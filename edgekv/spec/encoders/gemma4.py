"""Gemma 4: layers as in its decoder, positions of two tables, and averages of squares of patches."""

from __future__ import annotations

import math

from edgekv.spec.config import Config
from edgekv.spec.encoders.names import EncoderNames
from edgekv.spec.encoders.processor import BICUBIC, read_heads
from edgekv.spec.vision import EncoderSpec, LayerRows, PictureShapes, PictureSpec

MODEL_TYPES = ("gemma4",)

_MODEL = "model.vision_tower."
_LAYER = _MODEL + "encoder.layers.{layer}."

NAMES = EncoderNames(
    patches=_MODEL + "patch_embedder.input_proj",
    positions=_MODEL + "patch_embedder.position_embedding_table",
    attention_norm=_LAYER + "input_layernorm",
    q=_LAYER + "self_attn.q_proj.linear",
    k=_LAYER + "self_attn.k_proj.linear",
    v=_LAYER + "self_attn.v_proj.linear",
    o=_LAYER + "self_attn.o_proj.linear",
    feed_forward_norm=_LAYER + "pre_feedforward_layernorm",
    fc1=_LAYER + "mlp.gate_proj.linear",
    fc2=_LAYER + "mlp.down_proj.linear",
    projector="model.embed_vision.embedding_projection",
    gemma=(
        _LAYER + "mlp.up_proj.linear",
        _LAYER + "self_attn.q_norm",
        _LAYER + "self_attn.k_norm",
        _LAYER + "post_attention_layernorm",
        _LAYER + "post_feedforward_layernorm",
    ),
)

_IMAGE_TOKEN = 258_880
_ROWS = 280
"""Of a picture, at most: 645,120 pixels. Checkpoints may allow more, up to 1,120."""


def reads(config: Config) -> bool:
    """Whether neither the decoder has attention of pictures to both sides in layers with a window alone, nor the
    encoder numbers behind its averages. No published checkpoint whose decoder is exported has either.
    """
    if not isinstance(config.fields.get("vision_config"), dict):
        return False
    text, vision = config.table("text_config").fields, config.table("vision_config").fields
    return not text.get("use_bidirectional_attention") and not vision.get("standardize")


def describe(config: Config, processor: Config) -> EncoderSpec:
    """The encoder of transformers' `Gemma4VisionModel`."""
    vision = config.table("vision_config").with_defaults(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=16, num_attention_heads=12
    )
    vision.expect("hidden_activation", "gelu_pytorch_tanh")
    vision.expect("attention_bias", False)
    vision.expect("standardize", False)
    vision.ignore("max_position_embeddings", "default_output_length", "global_head_dim")
    rope = vision.table("rope_parameters")
    rope.expect("rope_type", "axial", "default")  # the latter means the same here
    heads, hidden = read_heads(vision, parts=4)
    vision.expect("head_dim", hidden // heads)
    shapes, eps = _shapes(vision, processor), vision.number("rms_norm_eps", 1e-6)
    side = shapes.most * shapes.merge  # of the longest strip
    if vision.size("position_embedding_size", 10_240) < side:
        raise vision.refusal("position_embedding_size", f"at least {side}, the patches of the longest edge")
    return EncoderSpec(
        model_type=config.text("model_type"),
        layers=vision.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=vision.size("num_key_value_heads", 12),
        intermediate=vision.size("intermediate_size"),
        image=math.isqrt(shapes.most) * shapes.step,
        patch=shapes.patch,
        merge=shapes.merge,
        output=config.text_decoder().size("hidden_size"),
        eps=eps,
        table_side=side,
        interpolation="summed",
        max_patches=shapes.most * shapes.merge**2,
        rotary_theta=rope.number("rope_theta", 100.0),
        norms="averages",
        pooled=True,
        projector_eps=eps / hidden,  # averages are multiplied by the root of the width before their norm
        gemma_layers=True,
        clipped=vision.flag("use_clipped_linears", False),
        layer_rows=_layer_rows(config.text_decoder()),
    )


def _layer_rows(text: Config) -> LayerRows | None:
    """What layers of the decoder read of rows: the token of padding stands for these in their table."""
    if not (width := text.count("hidden_size_per_layer_input", 256)):
        return None
    return LayerRows(
        layers=text.size("num_hidden_layers", 30),
        width=width,
        eps=text.number("rms_norm_eps", 1e-6),
        token=text.count("pad_token_id", 0),
    )


def pictures(config: Config, processor: Config) -> PictureSpec:
    """As transformers' `Gemma4ImageProcessor` and `Gemma4Processor` do it.

    Args:
        config: the checkpoint's `config.json`.
        processor: its `preprocessor_config.json`.
    """
    for name in ("do_resize", "do_rescale", "do_convert_rgb"):
        processor.expect(name, True)
    processor.expect("do_normalize", False)
    processor.expect("resample", BICUBIC)
    if abs((scale := processor.number("rescale_factor", 1 / 255)) - 1 / 255) > 1e-6:
        raise processor.refusal("rescale_factor", "1/255", got=f"{scale:g}")
    processor.ignore("image_mean", "image_std", "image_seq_length")  # of no step
    token = "<|image|>"
    return PictureSpec(
        tiling="none",
        resample="bicubic",
        mean=(0.5, 0.5, 0.5),
        deviation=(0.5, 0.5, 0.5),
        token=token,
        token_id=config.count("image_token_id", _IMAGE_TOKEN),
        begin="<|image>",
        whole="",
        end="<image|>",
        layout="joined",
        shapes=_shapes(config.table("vision_config"), processor),
    )


def _shapes(vision: Config, processor: Config) -> PictureShapes:
    """How large a picture is: as large as its rows allow."""
    patch, merge = vision.edge("patch_size", 16), vision.size("pooling_kernel_size", 3)
    for name, size in (("patch_size", patch), ("pooling_kernel_size", merge)):
        if (prepared := processor.size(name, size)) != size:
            raise processor.refusal(name, f"{size}, as config.json says", got=str(prepared))
    most = min(processor.size("max_soft_tokens", _ROWS), _ROWS)
    return PictureShapes(patch=patch, merge=merge, least=1, most=most, split_above=4096.0, fills=True)
