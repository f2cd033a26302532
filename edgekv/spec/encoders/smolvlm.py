"""SmolVLM and SmolVLM2: SigLIP's encoder, pixel shuffle, and one matrix as the projector."""

from __future__ import annotations

from edgekv.spec.config import Config
from edgekv.spec.encoders.names import siglip_names
from edgekv.spec.encoders.processor import HALF, LANCZOS, read_heads, read_normalization
from edgekv.spec.vision import EncoderSpec, PictureSpec

MODEL_TYPES = ("smolvlm",)

NAMES = siglip_names("model.vision_model.", projector="model.connector.modality_projection.proj", bucketed=True)

_IMAGE_TOKEN = 128257


def describe(config: Config, processor: Config) -> EncoderSpec:
    """SigLIP's encoder (arXiv 2303.15343) with SmolVLM's pixel shuffle (arXiv 2504.05299)."""
    vision = config.table("vision_config").with_defaults(
        hidden_size=1152,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=16,
        image_size=224,
        patch_size=32,
    )
    vision.expect("hidden_act", "gelu_pytorch_tanh")
    vision.expect("num_channels", 3)
    heads, hidden = read_heads(vision)
    image, patch, merge = vision.size("image_size"), vision.size("patch_size"), config.size("scale_factor", 2)
    if image % (patch * merge):
        raise vision.refusal("image_size", f"a multiple of patch_size = {patch} times scale_factor = {merge}")
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
    )


def pictures(config: Config, processor: Config) -> PictureSpec:
    """As transformers' `SmolVLMImageProcessor` and `SmolVLMProcessor` do it.

    Args:
        config: the checkpoint's `config.json`.
        processor: its `preprocessor_config.json`.
    """
    image = config.table("vision_config").size("image_size", 224)
    tile = processor.table("max_image_size").size("longest_edge", 364)
    if tile != image:
        raise processor.refusal("max_image_size", f"longest_edge {image}, the vision model's image_size", got=str(tile))
    mean, deviation = read_normalization(processor, LANCZOS, HALF, HALF)
    return PictureSpec(
        tiling="multiples" if processor.flag("do_image_splitting", True) else "none",
        resample="lanczos",
        longest=processor.table("size").size("longest_edge", 4 * 364),
        mean=mean,
        deviation=deviation,
        token="<image>",
        token_id=config.count("image_token_id", _IMAGE_TOKEN),
        begin="<fake_token_around_image>",
        whole="<global-img>",
        end="<fake_token_around_image>",
        layout="lines",
    )
