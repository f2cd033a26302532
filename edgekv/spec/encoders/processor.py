"""What the encoders of all families, and their image processors, have in common."""

from __future__ import annotations

import math
from pathlib import Path

from edgekv.errors import CheckpointError
from edgekv.spec.config import Config, read_json

_FILES = ("preprocessor_config.json", "processor_config.json")
_RESCALE = 1 / 255
Channels = tuple[float, float, float]

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
"""Pillow's numbers of filters."""
HALF: Channels = (0.5, 0.5, 0.5)
"""Mean and standard deviation of SigLIP's pictures."""
CLIP_MEAN: Channels = (0.48145466, 0.4578275, 0.40821073)
CLIP_DEVIATION: Channels = (0.26862954, 0.26130258, 0.27577711)
"""Those of CLIP's (arXiv 2103.00020)."""


def read_heads(
    vision: Config, field: str = "num_attention_heads", *, width: str = "hidden_size", parts: int = 1
) -> tuple[int, int]:
    """Heads of an encoder, and its width, which they divide.

    Args:
        vision: its configuration.
        field: with the heads.
        width: the field with the width.
        parts: into which the width of a head is divided.

    Raises:
        CheckpointError: the width of a head is no multiple of them.
    """
    heads, hidden = vision.size(field), vision.size(width)
    if hidden % (parts * heads):
        times = f"{parts} times " if parts > 1 else ""
        raise vision.refusal(width, f"a multiple of {times}{field} = {heads}")
    return heads, hidden


def read_side(vision: Config, field: str, default: int) -> int:
    """Edge of a square table of positions, of which a field has all.

    Raises:
        CheckpointError: they are no square.
    """
    table = vision.size(field, default)
    if (side := math.isqrt(table)) ** 2 != table:
        raise vision.refusal(field, "the square of a whole number")
    return side


def check_size(config: Config, processor: Config, image_default: int, size_default: int) -> None:
    """That the processor scales all pictures to the one size of the encoder.

    Args:
        config: `config.json`.
        processor: `preprocessor_config.json`.
        image_default: of `vision_config.image_size`.
        size_default: of both edges of the processor's `size`.

    Raises:
        CheckpointError: the processor scales to another size.
    """
    image, size = config.table("vision_config").edge("image_size", image_default), processor.table("size")
    if (processed := (size.size("height", size_default), size.size("width", size_default))) != (image, image):
        expected = f"height and width {image}, the vision model's image_size"
        raise processor.refusal("size", expected, got=" x ".join(map(str, processed)))


def read_normalization(
    processor: Config, resample: int, mean: Channels, deviation: Channels
) -> tuple[Channels, Channels]:
    """Mean and standard deviation of red, green and blue, of values from 0 to 1.

    Args:
        processor: `preprocessor_config.json`.
        resample: Pillow's number of the filter that it must name.
        mean: where it says none.
        deviation: where it says none.

    Raises:
        CheckpointError: it leaves out a step that is always done here, or resizes with another filter.
    """
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        processor.expect(name, True)
    processor.expect("do_center_crop", False)
    processor.expect("resample", resample)
    if abs((scale := processor.number("rescale_factor", _RESCALE)) - _RESCALE) > 1e-6:
        raise processor.refusal("rescale_factor", "1/255", got=f"{scale:g}")
    processor = processor.with_defaults(image_mean=[*mean], image_std=[*deviation])
    channels = [processor.numbers(name, 3) for name in ("image_mean", "image_std")]
    (a, b, c), (d, e, f) = channels
    return (a, b, c), (d, e, f)


def read_processor(folder: Path, *, is_needed: bool = True) -> Config:
    """How the pictures of a checkpoint are prepared: `preprocessor_config.json`, or what newer files hold of it.

    Args:
        folder: of the checkpoint.
        is_needed: whether there must be one; else all fields have their defaults without it.

    Raises:
        CheckpointError: the folder has no such file, or it is no JSON object.
    """
    for name in _FILES:
        if (folder / name).is_file():
            fields = read_json(folder / name)
            if isinstance(nested := fields.get("image_processor"), dict):
                return Config(nested, name)
            if name == _FILES[0]:
                return Config(fields, name)
    if not is_needed:
        return Config({}, _FILES[0])
    expected, fix = "how pictures are prepared", "Fetch the checkpoint again."
    raise CheckpointError(str(folder / _FILES[0]), got="no such file", expected=expected, fix=fix)
