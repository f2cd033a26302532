"""Files of pictures to pixels, within limits of size and memory."""

from __future__ import annotations

import math
import re
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, PngImagePlugin, UnidentifiedImageError

from edgekv.errors import UsageError
from edgekv.machine.system import MIB
from edgekv.pictures.tiled import EXPECTED, Pixels

MAX_PIXELS = 1 << 28
"""Of a picture."""
MAX_READ_PIXELS = 1 << 25
"""A larger picture is made smaller by a whole number while it is read."""
MAX_DECODED_BYTES = 704 * MIB
"""Of a picture as its decoder holds it."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_BEGINS = re.compile(rb"\x89PNG|\xff\xd8\xff|RIFF....WEBP|GIF8|BM", re.DOTALL)
"""How their files begin."""
_DAMAGED = (OSError, ValueError, SyntaxError, EOFError, struct.error, IndexError, KeyError, TypeError)
_JPEG = frozenset({"JPEG", "MPO"})  # MPO: a JPEG with previews or a second view, its first picture is the photo
_MAX_JPEG_STEPS = 3  # of a half each
_STRIP_PIXELS = 1 << 22
_TURNS = MappingProxyType(
    {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
)
"""By the orientation of EXIF."""
_FIRST_SIDEWAYS = 5
"""This orientation and the later ones swap width and height."""

Image.MAX_IMAGE_PIXELS = MAX_PIXELS
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY  # programs that draw store large texts
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # a limit of our own follows


class PicturePixels(NamedTuple):
    """A picture as it looks.

    Attributes:
        pixels: `[height, width, 3]`, at most `MAX_READ_PIXELS`.
        size: width and height as the file has them, turned as it is shown.
    """

    pixels: Pixels
    size: tuple[int, int]


def read_picture(content: bytes, field: str) -> PicturePixels:
    """A file's content as a picture: the first of an animation, turned as its EXIF says, on white.

    As transformers reads them; 16 bits of gray become 8, and squares of a picture beyond `MAX_READ_PIXELS` their mean.

    Args:
        content: of the file.
        field: for errors.

    Raises:
        UsageError: it is no picture of a known format, truncated, or too large.
    """
    with _named(field, content), Image.open(BytesIO(content), formats=FORMATS) as image:
        _check(image, field)
        size = image.size
        if image.format in _JPEG:  # its decoder is faster for a half, and holds less
            steps = min((_factor(size) - 1).bit_length(), _MAX_JPEG_STEPS)
            image.draft(None, (max(size[0] >> steps, 1), max(size[1] >> steps, 1)))
        image.load()
        orientation = _orientation(image.getexif)  # that of a PNG may stand behind the pixels
        shown = _on_white(image)
        if orientation in _TURNS:
            shown = shown.transpose(_TURNS[orientation])
        return PicturePixels(np.asarray(shown), _turned(size, orientation))


def picture_size(content: bytes, field: str) -> tuple[int, int]:
    """The size that `read_picture` gives, of the headers alone.

    Where the EXIF of a PNG stands behind the pixels, it is that before it is turned.

    Raises:
        UsageError: as `read_picture`, as far as the headers say.
    """
    with _named(field, content), Image.open(BytesIO(content), formats=FORMATS) as image:
        _check(image, field)
        # `getexif` of PngImageFile reads to the end of the pixels
        return _turned(image.size, _orientation(lambda: Image.Image.getexif(image)))


def _orientation(read: Callable[[], Image.Exif]) -> int:
    """What a file's EXIF says; 1 where that is damaged, which says nothing of the pixels."""
    try:
        orientation = read().get(ExifTags.Base.Orientation)
    except _DAMAGED:
        return 1
    return orientation if isinstance(orientation, int) else 1


def _turned(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    width, height = size
    return (height, width) if orientation in _TURNS and orientation >= _FIRST_SIDEWAYS else size


def _factor(size: tuple[int, int]) -> int:
    """How many times smaller a picture is read."""
    factor = max(math.isqrt((size[0] * size[1] - 1) // MAX_READ_PIXELS), 1)
    while math.ceil(size[0] / factor) * math.ceil(size[1] / factor) > MAX_READ_PIXELS:
        factor += 1
    return factor


def _check(image: Image.Image, field: str) -> None:
    width, height = image.size
    most = min(MAX_PIXELS, MAX_DECODED_BYTES // _pixel_bytes(image))
    if width * height > most:
        got, expected = f"{width:,} x {height:,} pixels", f"at most {most:,} pixels in such a file"
        raise UsageError(field, got=got, expected=expected, fix="Resize it first, or save it as JPEG.")


def _pixel_bytes(image: Image.Image) -> int:
    """How many bytes a decoder holds for each pixel at once, rounded up."""
    if image.format == "WEBP":
        return 20  # of libwebp's two frames, of what it returns, and of Pillow's
    if image.format in _JPEG:  # read by lines, or all its coefficients
        return 2 * len(image.getbands()) if image.info.get("progressive") else 1
    return {"1": 1, "L": 1, "P": 1, "I;16": 2}.get(image.mode, 4)


def _on_white(image: Image.Image) -> Image.Image:
    """A loaded picture as RGB with at most `MAX_READ_PIXELS`, made strip by strip."""
    (width, height), factor = image.size, _factor(image.size)
    rows = max(_STRIP_PIXELS // (width * factor), 1) * factor
    shown = Image.new("RGB", (math.ceil(width / factor), math.ceil(height / factor)))
    for top in range(0, height, rows):
        strip = _as_rgb(image.crop((0, top, width, min(top + rows, height))))
        shown.paste(strip.reduce(factor) if factor > 1 else strip, (0, top // factor))
    return shown


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        values = np.asarray(image)
        gray = (values >> 8).clip(0, 255).astype(np.uint8)
        if (clear := image.info.get("transparency")) is not None:
            gray[values == clear] = 255
        return Image.fromarray(gray).convert("RGB")
    if image.has_transparency_data:
        over = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", over.size, (255, 255, 255, 255)), over)
    return image.convert("RGB")


@contextmanager
def _named(field: str, content: bytes) -> Iterator[None]:
    """Name what Pillow raises on damaged files, which has no common base."""
    try:
        yield
    except UsageError:
        raise
    except UnidentifiedImageError:
        if _BEGINS.match(content):
            fix, expected = "Save or fetch it again.", "a whole picture"
            raise UsageError(field, got="a damaged file: its header is wrong", expected=expected, fix=fix) from None
        fix = "Convert it to PNG or JPEG."
        raise UsageError(field, got="a file of another kind", expected=EXPECTED, fix=fix) from None
    except Image.DecompressionBombError:
        expected = f"at most {MAX_PIXELS:,} pixels"
        raise UsageError(field, got="a picture of far more", expected=expected, fix="Resize it first.") from None
    except _DAMAGED as error:
        got = f"a damaged file: {' '.join(str(error).split())[:120]}"
        raise UsageError(field, got=got, expected="a whole picture", fix="Save or fetch it again.") from None
