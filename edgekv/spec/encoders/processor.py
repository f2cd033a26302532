"""What the image processors of all families have in common."""

from __future__ import annotations

from pathlib import Path

from edgekv.errors import CheckpointError
from edgekv.spec.config import Config, read_json

_FILES = ("preprocessor_config.json", "processor_config.json")
_RESCALE = 1 / 255
Channels = tuple[float, float, float]


def read_normalization(
    processor: Config, resample: int, mean: list[float], deviation: list[float]
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
    processor = processor.with_defaults(image_mean=mean, image_std=deviation)
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
    wanted, fix = "how pictures are prepared", "Fetch the checkpoint again."
    raise CheckpointError(str(folder / _FILES[0]), got="no such file", expected=wanted, fix=fix)
