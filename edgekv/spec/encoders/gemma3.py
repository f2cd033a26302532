"""Gemma 3: SigLIP for pictures of one size, whose patches are averaged, and one matrix as the projector."""

from __future__ import annotations

import math

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.encoders.names import siglip_names
from edgekv.spec.encoders.processor import BILINEAR, HALF, check_size, read_heads, read_normalization
from edgekv.spec.vision import EncoderSpec, PictureSpec

MODEL_TYPES = ("gemma3",)

_PROJECTOR = "model.multi_modal_projector."

NAMES = siglip_names(
    "model.vision_tower.",
    merged_norm=_PROJECTOR + "mm_soft_emb_norm",
    projector=_PROJECTOR + "mm_input_projection_weight",
    projector_inputs=True,
)

_IMAGE_TOKEN = 262144
_ROWS = 256


def describe(config: Config, processor: Config) -> EncoderSpec:
    """SigLIP's encoder (arXiv 2303.15343) with the average of each square of patches (arXiv 2503.19786)."""
    vision = config.table("vision_config").with_defaults(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12
    )
    vision.expect("hidden_act", "gelu_pytorch_tanh")
    vision.expect("num_channels", 3)
    vision.ignore("vision_use_head")
    heads, hidden = read_heads(vision)
    image, patch = vision.edge("image_size", 224), vision.edge("patch_size", 16)
    rows = config.size("mm_tokens_per_image", _ROWS)
    side = math.isqrt(rows)
    if side**2 != rows or image % (side * patch):
        expected = f"a square whose edge divides the {image // patch} patches of an edge"
        raise config.refusal("mm_tokens_per_image", expected)
    eps = vision.number("layer_norm_eps", 1e-6)
    return EncoderSpec(
        model_type=config.text("model_type"),
        layers=vision.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        intermediate=vision.size("intermediate_size"),
        image=image,
        patch=patch,
        merge=image // patch // side,
        output=config.text_decoder().size("hidden_size"),
        eps=eps,
        norms="both",
        pooled=True,
        projector_eps=eps,
    )


def pictures(config: Config, processor: Config) -> PictureSpec:
    """As transformers' `Gemma3ImageProcessor` and `Gemma3Processor` do it, without `pan_and_scan`, as by default.

    Args:
        config: the checkpoint's `config.json`.
        processor: its `preprocessor_config.json`.
    """
    check_size(config, processor, 224, 224)
    processor.expect("do_pan_and_scan", False)
    processor.ignore("pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate")
    mean, deviation = read_normalization(processor, BILINEAR, HALF, HALF)
    mark = "<start_of_image>"
    return PictureSpec(
        tiling="none",
        resample="bilinear",
        mean=mean,
        deviation=deviation,
        token="<image_soft_token>",
        token_id=config.count("image_token_index", _IMAGE_TOKEN),
        begin=f"\n\n{mark}",
        whole="",
        end="<end_of_image>\n\n",
        layout="joined",
        own_mark=mark,
    )


def decoder(config: Config, spec: DecoderSpec) -> DecoderSpec:
    """The decoder whose rows of a picture attend to each other."""
    return replace(spec, whole_pictures=True)
