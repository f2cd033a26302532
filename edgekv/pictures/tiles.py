"""A picture cut into tiles of an encoder's size, as transformers' processors do it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgekv.pictures.tiled import TiledPicture, TileGrid
from edgekv.spec import PictureShapes, PictureSpec

Pixels = NDArray[np.uint8]

_LONGEST_EDGE = 4096


def tile_grid(size: tuple[int, int], pictures: PictureSpec, edge: int) -> TileGrid:
    """How a picture of a width and height is cut; `cut_tiles` does it."""
    return _plan(size, pictures, edge)[0]


def cut_tiles(pixels: Pixels, pictures: PictureSpec, edge: int, size: tuple[int, int] | None = None) -> TiledPicture:
    """The tiles of a picture `[height, width, 3]`.

    Every size and pixel is that of transformers' `SmolVLMImageProcessor` or, for the nearest aspect ratio, of its
    `GotOcr2ImageProcessor`: each step is resized by itself. With shapes, sizes are those of its `Lfm2VlImageProcessor`,
    and pixels differ by 1 at most; without tiles, they are those of its `Qwen2VLImageProcessor`, to 1 as well.

    Args:
        pictures: says whether it is split, and how large it may be.
        edge: of a tile, in pixels.
        size: width and height that it had before it was read; None for those of its pixels.
    """
    image = Image.fromarray(pixels)
    grid, steps = _plan(size or image.size, pictures, edge)
    by = Image.Resampling[pictures.resample.upper()]
    if pictures.longest is not None:
        image = image.resize(steps[0], by)
    if pictures.tiling == "none" or (grid.whole is not None and not grid.rows):
        return TiledPicture((_whole(image, grid, edge, by),), grid)
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
    return TiledPicture((*tiles, _whole(last, grid, edge, by)), grid)


def _plan(size: tuple[int, int], pictures: PictureSpec, edge: int) -> tuple[TileGrid, list[tuple[int, int]]]:
    """The grid of a picture, and the sizes that it is resized to, one after the other."""
    steps = [size if pictures.longest is None else _bounded(*size, pictures.longest)]
    whole = None if pictures.shapes is None else _within(*steps[0], pictures.shapes)
    if pictures.sizes:
        whole = _nearest_size(*steps[0], pictures.sizes)
    is_small = pictures.shapes is not None and not _is_split(*steps[0], pictures.shapes)
    if pictures.tiling == "none" or is_small:
        return TileGrid(size, whole=whole), steps
    if pictures.tiling == "aspect":
        columns, rows = _nearest_grid(*steps[0], edge, pictures.min_tiles, pictures.max_tiles)
        steps.append((columns * edge, rows * edge))
    else:
        steps.append(_multiples(*steps[0], edge))
        columns, rows = steps[1][0] // edge, steps[1][1] // edge
    return TileGrid(size) if columns * rows == 1 else TileGrid(size, rows, columns, whole), steps


def _whole(image: Image.Image, grid: TileGrid, edge: int, by: Image.Resampling) -> Pixels:
    return np.asarray(image.resize(grid.whole or (edge, edge), by))


def _is_split(width: int, height: int, shapes: PictureShapes) -> bool:
    """Whether a picture is too large for one tile."""
    area = max(shapes.patch, _nearest(width, shapes.step)) * max(shapes.patch, _nearest(height, shapes.step))
    return area > shapes.most * shapes.step**2 * shapes.split_above


def _within(width: int, height: int, shapes: PictureShapes) -> tuple[int, int]:
    """Width and height in whole steps, with an area within the limits and nearly the same ratio."""
    step, least, most = shapes.step, shapes.least * shapes.step**2, shapes.most * shapes.step**2
    if shapes.fills:
        factor = math.sqrt(most / (width * height))
        filled = [math.floor(factor * edge / step) * step for edge in (width, height)]
        if not all(filled):  # of a strip
            longer = int(height > width)
            filled[longer] = min(max(width, height) // min(width, height), shapes.most) * step
            filled[1 - longer] = step
        return filled[0], filled[1]
    within = [max(step, _nearest(edge, step)) for edge in (width, height)]
    if (area := within[0] * within[1]) > most:
        factor = math.sqrt(width * height / most)
        within = [max(step, math.floor(edge / factor / step) * step) for edge in (width, height)]
    elif area < least:
        factor = math.sqrt(least / (width * height))
        within = [math.ceil(edge * factor / step) * step for edge in (width, height)]
    if within[0] * within[1] > most:  # of a long strip; transformers has more rows there than it lets others have
        longer = int(within[1] > within[0])
        within[longer] = max(most // within[1 - longer] // step, 1) * step
    if shapes.windows_of(*within) > shapes.windows:  # of a strip too, whose windows are not full
        longer, edge = int(within[1] > within[0]), shapes.window * step
        within[longer] = shapes.windows // -(-within[1 - longer] // edge) * edge
    return within[0], within[1]


def _nearest_size(width: int, height: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Of these widths and heights those whose ratio is nearest to that of a picture; of equal ones, whose area is."""

    def distance(size: tuple[int, int]) -> tuple[float, float]:
        return abs(math.log(width / height) - math.log(size[0] / size[1])), abs(
            math.log(width * height) - math.log(size[0] * size[1])
        )

    return min(sizes, key=distance)


def _nearest(edge: int, step: int) -> int:
    return round(edge / step) * step


def _nearest_grid(width: int, height: int, edge: int, min_tiles: int, max_tiles: int) -> tuple[int, int]:
    """Columns and rows of tiles with the ratio nearest to that of a picture.

    Of grids that are equally near, the picture gets the larger one unless it would have less than half of its pixels.
    """
    sizes = range(1, max_tiles + 1)
    grids = sorted(
        ((columns, rows) for columns in sizes for rows in sizes if min_tiles <= columns * rows <= max_tiles),
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
