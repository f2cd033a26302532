"""LFM2-VL: SigLIP 2 for pictures of any shape, pixel unshuffle, and two matrices as the projector."""

from __future__ import annotations

from edgekv.spec.config import Config
from edgekv.spec.encoders.names import siglip_names
from edgekv.spec.encoders.processor import BILINEAR, HALF, read_heads, read_normalization, read_side
from edgekv.spec.vision import EncoderSpec, PictureShapes, PictureSpec

MODEL_TYPES = ("lfm2_vl",)

_PROJECTOR = "model.multi_modal_projector."

NAMES = siglip_names(
    "model.vision_tower.",
    merged_norm=_PROJECTOR + "layer_norm",
    projector=_PROJECTOR + "linear_1",
    projector_out=_PROJECTOR + "linear_2",
)

_IMAGE_TOKEN = 396


def describe(config: Config, processor: Config) -> EncoderSpec:
    """SigLIP 2 with naflex (arXiv 2502.14786) and LFM2-VL's projector; the largest square is a tile."""
    vision = config.table("vision_config").with_defaults(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12
    )
    vision.expect("hidden_act", "gelu_pytorch_tanh")
    vision.expect("num_channels", 3)
    config.expect("projector_hidden_act", "gelu")
    config.expect("projector_bias", True)
    config.expect("vision_feature_layer", -1)
    (heads, hidden), side = read_heads(vision), read_side(vision, "num_patches", 256)
    patch, merge = vision.edge("patch_size", 16), config.size("downsample_factor", 2)
    if (tile := processor.size("tile_size", 512)) % (patch * merge):
        expected = f"a multiple of patch_size = {patch} times downsample_factor = {merge}"
        raise processor.refusal("tile_size", expected, got=str(tile))
    return EncoderSpec(
        model_type=config.text("model_type"),
        layers=vision.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        intermediate=vision.size("intermediate_size"),
        image=tile,
        patch=patch,
        merge=merge,
        output=config.text_decoder().size("hidden_size"),
        eps=vision.number("layer_norm_eps", 1e-6),
        table_side=side,
        projector="mlp",
        projector_width=config.size("projector_hidden_size", 2560),
        norms="both" if config.flag("projector_use_layernorm", True) else "patches",
    )


def pictures(config: Config, processor: Config) -> PictureSpec:
    """As transformers' `Lfm2VlImageProcessor` and `Lfm2VlProcessor` do it.

    Args:
        config: the checkpoint's `config.json`.
        processor: its `preprocessor_config.json`.
    """
    patch, merge = config.table("vision_config").edge("patch_size", 16), config.size("downsample_factor", 2)
    for name, default, size in (("encoder_patch_size", 16, patch), ("downsample_factor", 2, merge)):
        if (processed := processor.size(name, default)) != size:
            raise processor.refusal(name, f"{size}, as config.json says", got=str(processed))
    processor.expect("use_thumbnail", True)
    processor.expect("do_pad", True)
    processor.ignore("size")  # that of tiles and shapes is in fields of their own
    least, most = processor.size("min_tiles", 2), processor.size("max_tiles", 10)
    splits = processor.flag("do_image_splitting", True) and most > 1
    if splits and least < 2:
        raise processor.refusal("min_tiles", "2 or more")
    step, rows = patch * merge, processor.size("max_image_tokens", 256)
    if rows > (max_rows := (processor.size("tile_size", 512) // step) ** 2):
        raise processor.refusal("max_image_tokens", f"at most {max_rows}, those of a tile", got=str(rows))
    mean, deviation = read_normalization(processor, BILINEAR, HALF, HALF)
    return PictureSpec(
        tiling="aspect" if splits else "none",
        resample="bilinear",
        min_tiles=least,
        max_tiles=most,
        mean=mean,
        deviation=deviation,
        token="<image>",
        token_id=config.count("image_token_id", _IMAGE_TOKEN),
        begin="<|image_start|>",
        whole="<|img_thumbnail|>",
        end="<|image_end|>",
        layout="marked",
        shapes=PictureShapes(
            patch=patch,
            merge=merge,
            least=processor.size("min_image_tokens", 64),
            most=rows,
            split_above=processor.number("max_pixels_tolerance", 2.0),
        ),
    )
