"""InternVL 3 and 3.5 in transformers' form: InternViT with a class and scaled layers, and two matrices as projector."""

from __future__ import annotations

from edgekv.spec.config import Config
from edgekv.spec.encoders.names import EncoderNames
from edgekv.spec.encoders.processor import (
    BICUBIC,
    CLIP_DEVIATION,
    CLIP_MEAN,
    check_size,
    read_heads,
    read_normalization,
)
from edgekv.spec.vision import EncoderSpec, PictureSpec

MODEL_TYPES = ("internvl",)

_MODEL, _LAYER = "model.vision_tower.", "model.vision_tower.encoder.layer.{layer}."
_PROJECTOR = "model.multi_modal_projector."

NAMES = EncoderNames(
    patches=_MODEL + "embeddings.patch_embeddings.projection",
    positions=_MODEL + "embeddings.position_embeddings",
    class_row=_MODEL + "embeddings.cls_token",
    attention_norm=_LAYER + "layernorm_before",
    q=_LAYER + "attention.q_proj",
    k=_LAYER + "attention.k_proj",
    v=_LAYER + "attention.v_proj",
    o=_LAYER + "attention.projection_layer",
    attention_scale=_LAYER + "lambda_1",
    feed_forward_norm=_LAYER + "layernorm_after",
    fc1=_LAYER + "mlp.fc1",
    fc2=_LAYER + "mlp.fc2",
    feed_forward_scale=_LAYER + "lambda_2",
    merged_norm=_PROJECTOR + "layer_norm",
    projector=_PROJECTOR + "linear_1",
    projector_out=_PROJECTOR + "linear_2",
)

_IMAGE_TOKEN = 151667


def describe(config: Config, processor: Config) -> EncoderSpec:
    """InternViT (arXiv 2312.14238) with pixel shuffle, for pictures of one size."""
    vision = config.table("vision_config").with_defaults(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16
    )
    fixed = {
        "hidden_act": "gelu",
        "num_channels": 3,
        "norm_type": "layer_norm",
        "use_qk_norm": False,
        "use_mean_pooling": True,
        "use_absolute_position_embeddings": True,
    }
    for name, value in fixed.items():
        vision.expect(name, value)
    config.expect("projector_hidden_act", "gelu")
    config.expect("vision_feature_layer", -1)
    config.expect("vision_feature_select_strategy", "default")
    heads, hidden = read_heads(vision)
    image, patch, merge = vision.edge("image_size", 448), vision.edge("patch_size", 14), _merge(config)
    if image % (patch * merge):
        raise vision.refusal("image_size", f"a multiple of {merge} patches of {patch}")
    return EncoderSpec(
        model_type=config.text("model_type"),
        layers=vision.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        intermediate=vision.size("intermediate_size"),
        image=image,
        patch=patch,
        merge=merge,
        output=config.text_decoder().size("hidden_size"),
        eps=vision.number("layer_norm_eps", 1e-6),
        has_class=True,
        exact_gelu=True,
        projector="mlp",
        norms="merged",
        biased_inputs=vision.flag("attention_bias"),
    )


def pictures(config: Config, processor: Config) -> PictureSpec:
    """As transformers' `GotOcr2ImageProcessor` and `InternVLProcessor` do it: that splits pictures by default.

    Args:
        config: the checkpoint's `config.json`.
        processor: its `preprocessor_config.json`.
    """
    check_size(config, processor, 448, 384)
    mean, deviation = read_normalization(processor, BICUBIC, CLIP_MEAN, CLIP_DEVIATION)
    max_tiles = processor.size("max_patches", 12)
    return PictureSpec(
        tiling="aspect" if max_tiles > 1 else "none",
        resample="bicubic",
        min_tiles=processor.size("min_patches", 1),
        max_tiles=max_tiles,
        mean=mean,
        deviation=deviation,
        token="<IMG_CONTEXT>",
        token_id=config.count("image_token_id", _IMAGE_TOKEN),
        begin="<img>",
        whole="",
        end="</img>",
        layout="joined",
    )


def _merge(config: Config) -> int:
    """The edge of the squares that become one row."""
    ratio = config.number("downsample_ratio", 0.5)
    if ratio > 1 or (1 / ratio) % 1:
        raise config.refusal("downsample_ratio", "1 over a whole number")
    return int(1 / ratio)
