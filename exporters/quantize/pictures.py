"""Pictures to calibrate a vision encoder with: drawn, the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import UsageError
from edgekv.pictures import open_tiles
from edgekv.spec import PictureSpec

CALIBRATION_TILES = 6
"""Drawn pictures; the ranges of one more lie within those of these and their headroom."""

_FIELD = "--calibration-pictures"
_MAX_FILES = 64
_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"})
_SHAPES = 12
_TOKENS_BEFORE = 8  # of a text, in front of a picture


@dataclass(frozen=True, slots=True)
class CalibrationPictures:
    """What an encoder is calibrated on.

    Attributes:
        name: in the manifest.
        tiles: each `[height, width, 3]`.
    """

    name: str
    tiles: tuple[NDArray[np.uint8], ...]


def calibration_pictures(folder: Path | None, spec: PictureSpec, edge: int) -> CalibrationPictures:
    """The pictures of a folder, each as the whole in one tile, and its first tile if it is split; None for drawn ones.

    Raises:
        UsageError: the folder has no pictures or too many, or one cannot be read.
    """
    if folder is None:
        return CalibrationPictures(
            "drawn", tuple(_drawn_tile(number, spec, edge) for number in range(CALIBRATION_TILES))
        )
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
    except OSError as error:
        fix = "Check the path."
        raise UsageError(_FIELD, got=error.strerror or error, expected="a folder of pictures", fix=fix) from None
    if not 1 <= len(files) <= _MAX_FILES:
        expected, fix = (
            f"1 to {_MAX_FILES} of {', '.join(sorted(_SUFFIXES))}",
            "Choose some that show what users send.",
        )
        raise UsageError(_FIELD, got=f"{len(files)} pictures in {folder}", expected=expected, fix=fix)
    tiles = list[NDArray[np.uint8]]()
    for file in files:
        cut = open_tiles(file, f"{_FIELD}: {file.name}", spec, edge).tiles
        tiles += [cut[-1], *cut[:-1][:1]]
    return CalibrationPictures(folder.name, tuple(tiles))


def _drawn_tile(number: int, spec: PictureSpec, edge: int) -> NDArray[np.uint8]:
    """A drawn picture; with shapes, each third one is a strip from side to side and one from top to bottom; with sizes,
    it has one of them.
    """
    if spec.sizes:
        width, height = spec.sizes[number % len(spec.sizes)]
        return drawn_picture(number, max(width, height))[:height, :width]
    drawn = drawn_picture(number, edge)
    if spec.shapes is None or not number % 3:
        return drawn
    step = spec.shapes.step
    half = max(edge // 2 // step, 1) * step
    return drawn[:half] if number % 3 == 1 else np.ascontiguousarray(drawn[:, :half])


def with_pictures(tokens: NDArray[np.int64], vocab: int, rows: Sequence[int]) -> NDArray[np.int64]:
    """Windows of token ids `[windows, T]`, the first of them with the rows of a tile each.

    Rows have ids from `vocab` on, by tile; see `Checkpoint.with_pictures`. What does not fit a window is left out.

    Args:
        tokens: of text.
        vocab: the number of tokens.
        rows: of each tile.
    """
    placed, first = tokens.copy(), vocab
    for count, window in zip(rows, placed, strict=False):
        place = window[_TOKENS_BEFORE : _TOKENS_BEFORE + count]
        place[:] = first + np.arange(len(place))
        first += count
    return placed


def drawn_picture(number: int, edge: int) -> NDArray[np.uint8]:
    """A picture `[edge, edge, 3]`: a gradient, shapes of all sizes in two textures, noise, and lines like writing."""
    random = np.random.default_rng(number)
    y, x = np.mgrid[0:edge, 0:edge].astype(np.float32) / edge
    corners = random.integers(0, 256, (3, 3)).astype(np.float32)
    picture = corners[0] + x[..., None] * (corners[1] - corners[0]) + y[..., None] * (corners[2] - corners[0])
    for shape in range(_SHAPES):
        center, size = random.random(2), 0.5 * random.random() ** 2 + 0.02
        across, down = (x - center[0]) / size, (y - center[1]) / (size * random.uniform(0.3, 1.0))
        inside = (np.maximum(abs(across), abs(down)) if shape % 2 else across**2 + down**2) < 1
        texture = (np.sin(across * random.uniform(2, 40)) > 0) if shape % 3 == 0 else np.ones_like(inside)
        picture[inside & texture] = random.integers(0, 256, 3)
    top = random.integers(0, edge)
    rows = slice(top, top + edge // 8)
    writing = (random.random((edge, edge)) < 0.5) & (np.sin(y * edge * 0.7) > 0)
    picture[rows][writing[rows]] = random.integers(0, 256, 3)
    picture += random.normal(0, random.uniform(0, 12), picture.shape)
    pixels: NDArray[np.uint8] = picture.clip(0, 255).astype(np.uint8)
    return pixels
