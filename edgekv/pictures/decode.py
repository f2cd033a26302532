"""Files of pictures to pixels, within limits of size and memory."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from edgekv.errors import UsageError
from edgekv.pictures.tiled import WANTED, Pixels

MAX_PIXELS = 1 << 25
"""Of a picture before it is resized; it takes at most about 12 bytes a pixel while it is read."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_STILL = frozenset({"MPO"})  # a JPEG with previews or a second view: its first picture is the photo
_SIDEWAYS = (5, 6, 7, 8)
"""Orientations of EXIF that swap width and height."""

warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # a limit of our own follows


def read_picture(content: bytes, field: str) -> Pixels:
    """The pixels `[height, width, 3]` of a file's content, turned as its EXIF says, on white.

    As transformers reads them; 16 bits of gray become 8.

    Args:
        content: of the file.
        field: for errors.

    Raises:
        UsageError: it is no picture of a known format, truncated, animated, or too large.
    """
    with _named(field), Image.open(BytesIO(content), formats=FORMATS) as image:
        _check(image, field)
        return _pixels(image)


def picture_size(content: bytes, field: str) -> tuple[int, int]:
    """Width and height as `read_picture` gives them, of the headers alone.

    Where the EXIF of a PNG stands behind the pixels, they are those before it is turned.

    Raises:
        UsageError: as `read_picture`, as far as the headers say.
    """
    with _named(field), Image.open(BytesIO(content), formats=FORMATS) as image:
        _check(image, field)
        exif = Image.Image.getexif(image)  # that of PngImageFile reads to the end of the pixels
        width, height = image.size
        return (height, width) if exif.get(ExifTags.Base.Orientation) in _SIDEWAYS else (width, height)


def _check(image: Image.Image, field: str) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        found, wanted = f"{width:,} x {height:,} pixels", f"at most {MAX_PIXELS:,} pixels"
        raise UsageError(field, got=found, expected=wanted, fix="Resize it first.")
    if image.format not in _STILL and getattr(image, "is_animated", False):
        found = f"an animated {image.format}"
        raise UsageError(field, got=found, expected="one picture", fix="Save one of its frames as a picture.")


def _pixels(image: Image.Image) -> Pixels:
    image.load()
    turned = ImageOps.exif_transpose(image)
    if turned.mode.startswith("I"):
        gray = (np.asarray(turned) >> 8).clip(0, 255).astype(np.uint8)
        return np.repeat(gray[..., None], 3, axis=-1)
    if turned.has_transparency_data:
        over = turned.convert("RGBA")
        turned = Image.alpha_composite(Image.new("RGBA", over.size, (255, 255, 255, 255)), over)
    return np.asarray(turned.convert("RGB"))


@contextmanager
def _named(field: str) -> Iterator[None]:
    """Name what Pillow raises on damaged files, which has no common base."""
    try:
        yield
    except UsageError:
        raise
    except UnidentifiedImageError:
        fix = "Convert it to PNG or JPEG."
        raise UsageError(field, got="a file of another kind", expected=WANTED, fix=fix) from None
    except Image.DecompressionBombError:
        wanted = f"at most {MAX_PIXELS:,} pixels"
        raise UsageError(field, got="a picture of far more", expected=wanted, fix="Resize it first.") from None
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, IndexError, KeyError, TypeError) as error:
        found = f"a damaged file: {' '.join(str(error).split())[:120]}"
        raise UsageError(field, got=found, expected="a whole picture", fix="Save or fetch it again.") from None
