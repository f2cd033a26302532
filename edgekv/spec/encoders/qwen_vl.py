"""What the encoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, their image processors and decoders have in common."""

from __future__ import annotations

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.encoders.names import EncoderNames
from edgekv.spec.encoders.processor import BICUBIC, CLIP_DEVIATION, CLIP_MEAN, read_normalization
from edgekv.spec.vision import EncoderSpec, PictureShapes, PictureSpec

FRAMES = 2
"""Of a patch: a picture is shown as two."""
EPS = 1e-6
"""Of the norms."""

MODEL, LAYER = "model.visual.", "model.visual.blocks.{layer}."
"""Where a checkpoint has the encoder, and a layer of it."""
MERGER_NAMES = EncoderNames(
    patches=MODEL + "patch_embed.proj",
    positions="",
    attention_norm=LAYER + "norm1",
    q=LAYER + "attn.qkv",
    k=LAYER + "attn.qkv",
    v=LAYER + "attn.qkv",
    o=LAYER + "attn.proj",
    feed_forward_norm=LAYER + "norm2",
    fc1=LAYER + "mlp.fc1",
    fc2=LAYER + "mlp.fc2",
    last_norm=MODEL + "merger.ln_q",
    projector=MODEL + "merger.mlp.0",
    projector_out=MODEL + "merger.mlp.2",
    frames=FRAMES,
)
"""Names of Qwen2-VL; the others differ in some."""

_IMAGE_TOKEN = 151655
_MAX_ROWS = 256
"""Of a picture where the export names no sizes. Checkpoints allow 16,384, beyond any phone."""
_LONGEST = 4
"""How many times as long as wide a picture may be without being made smaller for the sake of windows."""


def _read_width(config: Config, vision: Config, field: str) -> int:
    """Width of the encoder's rows, which is that of the decoder.

    Args:
        config: the checkpoint's `config.json`.
        vision: its `vision_config`.
        field: with the width.

    Raises:
        CheckpointError: they differ.
    """
    width = config.text_decoder().size("hidden_size")
    if vision.size(field, 3584) != width:
        raise vision.refusal(field, f"{width}, the hidden_size of the text model")
    return width


def describe_encoder(
    config: Config, vision: Config, shapes: PictureShapes, *, hidden: int, heads: int, inner: int, width_field: str
) -> EncoderSpec:
    """A ViT with a rotary embedding of rows and columns and a merger of two matrices: what all three have.

    Args:
        config: the checkpoint's `config.json`.
        vision: its `vision_config`.
        shapes: of pictures.
        hidden: width of the residual.
        heads: of attention.
        inner: width of the feed-forward.
        width_field: of `vision_config`, with the width of the rows.

    Raises:
        CheckpointError: the decoder has another width.
    """
    return EncoderSpec(
        model_type=config.text("model_type"),
        layers=vision.size("depth"),
        hidden=hidden,
        heads=heads,
        intermediate=inner,
        image=shapes.square,
        patch=shapes.patch,
        merge=shapes.merge,
        output=_read_width(config, vision, width_field),
        eps=EPS,
        max_patches=shapes.most * shapes.merge**2,
        rotary_theta=_read_theta(vision),
        projector="mlp",
        projector_width=hidden * shapes.merge**2,
    )


def _read_theta(vision: Config) -> float:
    """Base of the rotary embedding of rows and columns."""
    rope = vision.table("rope_parameters")
    rope.expect("rope_type", "axial", "default")
    return rope.number("rope_theta", 1e4)


def read_shapes(vision: Config, processor: Config, patch_default: int, window: int = 0) -> PictureShapes:
    """How large a picture may be.

    Args:
        vision: `vision_config`.
        processor: `preprocessor_config.json`.
        patch_default: edge of a patch, where the configuration has none.
        window: edge of the encoder's windows, in pixels; 0 without.

    Raises:
        CheckpointError: no picture has such a size, or a window is no whole number of rows.
    """
    patch, merge = vision.edge("patch_size", patch_default), vision.size("spatial_merge_size", 2)
    size, step = processor.table("size"), patch * merge
    least = processor.size("min_pixels", size.size("shortest_edge", 56 * 56))
    most = processor.size("max_pixels", size.size("longest_edge", 28 * 28 * 1280))
    if most < max(step**2, least):
        raise size.refusal("longest_edge", f"at least {max(step**2, least)} pixels", got=str(most))
    rows, edge = min(most // step**2, _MAX_ROWS), window // step
    if window and not edge:
        raise vision.refusal("window_size", f"at least {step}, a square of merged patches")
    return PictureShapes(
        patch=patch,
        merge=merge,
        least=min(-(-least // step**2), rows),
        most=rows,
        split_above=4096.0,
        window=edge,
        windows=_max_windows(rows, edge) if edge else 0,
    )


def _max_windows(rows: int, edge: int) -> int:
    """The most windows that a picture of at most `rows` rows needs, unless it is longer than `_LONGEST` allows."""
    sizes = ((down, across) for down in range(1, rows + 1) for across in range(1, rows // down + 1))
    return max(-(-a // edge) * -(-b // edge) for a, b in sizes if max(a, b) <= _LONGEST * min(a, b))


def read_pictures(config: Config, processor: Config, shapes: PictureShapes) -> PictureSpec:
    """As transformers' `Qwen2VLImageProcessor` and the processors of these models do it.

    Args:
        config: the checkpoint's `config.json`.
        processor: its `preprocessor_config.json`.
        shapes: of pictures.

    Raises:
        CheckpointError: pictures are prepared in another way.
    """
    for name, size in (("patch_size", shapes.patch), ("merge_size", shapes.merge)):
        if (prepared_size := processor.size(name, size)) != size:
            raise processor.refusal(name, f"{size}, as config.json says", got=str(prepared_size))
    processor.expect("temporal_patch_size", FRAMES)
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


def read_sections(table: Config, spec: DecoderSpec, default: tuple[int, int, int]) -> tuple[int, int, int]:
    """How many pairs of the decoder's rotary embedding turn with the place in the text, with rows and with columns.

    Args:
        table: the parameters of the rotary embedding.
        spec: the decoder.
        default: where they have none.

    Raises:
        CheckpointError: they are not three numbers, or not all pairs.
    """
    sections, pairs = table.fields.get("mrope_section", [*default]), spec.rope.width // 2
    is_list = isinstance(sections, list) and len(sections) == 3 and all(type(section) is int for section in sections)
    if not is_list or min(sections) < 0 or sum(sections) != pairs:
        raise table.refusal("mrope_section", f"three numbers, together {pairs}", got=str(sections)[:80])
    text, rows, columns = sections
    return text, rows, columns


def in_sections(config: Config, spec: DecoderSpec) -> tuple[int, ...]:
    """What each pair of the decoder's rotary embedding turns with, section by section: see `DecoderSpec.picture_axes`.

    Raises:
        CheckpointError: `mrope_section` is not three numbers of all pairs.
    """
    text = config.table("text_config") or config
    sections = read_sections(text.table("rope_scaling") or text.table("rope_parameters"), spec, (16, 24, 24))
    return tuple(axis for axis, pairs in enumerate(sections) for _ in range(pairs))
