"""What the image processors of all families have in common."""

from __future__ import annotations

from edgekv.spec.config import Config

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
    found = [processor.numbers(name, 3) for name in ("image_mean", "image_std")]
    (a, b, c), (d, e, f) = found
    return (a, b, c), (d, e, f)
