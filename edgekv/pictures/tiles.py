"""A picture cut into tiles of an encoder's size, as transformers' processors do it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgekv.pictures.tiled import TiledPicture, TileGrid
from edgekv.spec import PictureSpec

Pixels = NDArray[np.uint8]

_LONGEST_EDGE = 4096


def tile_grid(size: tuple[int, int], pictures: PictureSpec, edge: int) -> TileGrid:
    """How a picture of a width and height is cut; `cut_tiles` does it."""
    return _plan(size, pictures, edge)[0]


def cut_tiles(pixels: Pixels, pictures: PictureSpec, edge: int) -> TiledPicture:
    """The tiles of a picture `[height, width, 3]`.

    Every size and pixel is that of transformers' `SmolVLMImageProcessor` or, for the nearest aspect ratio, of its
    `GotOcr2ImageProcessor`: each step is resized by itself.

    Args:
        pixels: the picture.
        pictures: says whether it is split, and how large it may be.
        edge: of a tile, in pixels.
    """
    image = Image.fromarray(pixels)
    grid, steps = _plan(image.size, pictures, edge)
    by = Image.Resampling[pictures.resample.upper()]
    if pictures.longest is not None:
        image = image.resize(steps[0], by)
    if pictures.tiling == "none":
        return TiledPicture((_square(image, edge, by),), grid)
    split = image.resize(steps[-1], by)
    whole = np.asarray(split)
    if not grid.rows:
        return TiledPicture((whole,), grid)
    tiles = [
        whole[row * edge : (row + 1) * edge, column * edge : (column + 1) * edge]
        for row in range(grid.rows)
        for column in range(grid.columns)
    ]
    last = split if pictures.tiling == "multiples" else image
    return TiledPicture((*tiles, _square(last, edge, by)), grid)


def _plan(size: tuple[int, int], pictures: PictureSpec, edge: int) -> tuple[TileGrid, list[tuple[int, int]]]:
    """The grid of a picture, and the sizes that it is resized to, one after the other."""
    steps = [size if pictures.longest is None else _bounded(*size, pictures.longest)]
    if pictures.tiling == "none":
        return TileGrid(size), steps
    if pictures.tiling == "aspect":
        columns, rows = _nearest_grid(*steps[0], edge, pictures.least_tiles, pictures.most_tiles)
        steps.append((columns * edge, rows * edge))
    else:
        steps.append(_multiples(*steps[0], edge))
        columns, rows = steps[1][0] // edge, steps[1][1] // edge
    return TileGrid(size) if columns * rows == 1 else TileGrid(size, rows, columns), steps


def _square(image: Image.Image, edge: int, by: Image.Resampling) -> Pixels:
    return np.asarray(image.resize((edge, edge), by))


def _nearest_grid(width: int, height: int, edge: int, least: int, most: int) -> tuple[int, int]:
    """Columns and rows of tiles with the ratio nearest to that of a picture.

    Of grids that are equally near, the picture gets the larger one unless it would have less than half of its pixels.
    """
    sizes = range(1, most + 1)
    grids = sorted(
        ((columns, rows) for columns in sizes for rows in sizes if least <= columns * rows <= most),
        key=lambda grid: grid[0] * grid[1],
    )
    ratio, best, nearest = width / height, (1, 1), math.inf
    for columns, rows in grids:
        distance = abs(ratio - columns / rows)
        if distance < nearest or (distance == nearest and width * height > 0.5 * edge * edge * columns * rows):
            nearest, best = distance, (columns, rows)
    return best


def _bounded(width: int, height: int, longest: int) -> tuple[int, int]:
    """Width and height with a longer edge of `longest`, the shorter one even; no edge above 4,096."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _LONGEST_EDGE:
        width, height = _LONGEST_EDGE, int(_LONGEST_EDGE / ratio)
    elif height > width and height > _LONGEST_EDGE:
        width, height = int(_LONGEST_EDGE * ratio), _LONGEST_EDGE
    return max(width, 1), max(height, 1)


def _multiples(width: int, height: int, edge: int) -> tuple[int, int]:
    """Width and height as multiples of a tile's edge: the longer one first, and the shorter one follows."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / edge) * edge
        height = math.ceil(int(width / ratio) / edge) * edge
    else:
        height = math.ceil(height / edge) * edge
        width = math.ceil(int(height * ratio) / edge) * edge
    return width, height
