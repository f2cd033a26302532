"""A picture cut into tiles."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
EXPECTED = "a picture: PNG, JPEG, WebP, GIF or BMP"
"""What files may be, for errors."""


class TileGrid(msgspec.Struct, frozen=True):
    """How a picture is cut: into tiles, row by row, and the whole picture last; or into the whole picture alone.

    Attributes:
        size: width and height of the picture as it was given.
        rows: of tiles; 0 if there is only the whole picture.
        columns: of tiles.
        whole: width and height of the whole picture's tile; None if it is as all others.
    """

    size: tuple[int, int]
    rows: int = 0
    columns: int = 0
    whole: tuple[int, int] | None = None

    def tile_sizes(self, edge: int) -> list[tuple[int, int]]:
        """Width and height of each tile.

        Args:
            edge: of a square tile, in pixels.
        """
        return [(edge, edge)] * (self.rows * self.columns) + [self.whole or (edge, edge)]

    @property
    def tiles(self) -> int:
        """Number of tiles, the whole picture included."""
        return self.rows * self.columns + 1 if self.rows else 1


@dataclass(frozen=True, slots=True)
class TiledPicture:
    """A picture as an encoder reads it: tiles `[height, width, 3]`."""

    tiles: tuple[Pixels, ...]
    grid: TileGrid
