"""A picture cut into tiles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
WANTED = "a picture: PNG, JPEG, WebP, GIF or BMP"
"""What files may be, for errors."""


@dataclass(frozen=True, slots=True)
class TiledPicture:
    """A picture as an encoder reads it.

    Attributes:
        tiles: `[edge, edge, 3]` each: row by row, and the whole picture last.
        rows: of tiles; 0 if there is only the whole picture.
        columns: of tiles.
        size: width and height of the picture as it was given.
    """

    tiles: tuple[Pixels, ...]
    rows: int
    columns: int
    size: tuple[int, int]
