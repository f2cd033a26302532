"""Pictures in prompts: decoded, cut into tiles, encoded, and named by token ids of their own."""

from typing import TYPE_CHECKING

from edgekv.lazy import lazy

if TYPE_CHECKING:
    from edgekv.pictures.apart import PictureFile, PictureReader, open_tiles, picture_content
    from edgekv.pictures.decode import read_picture
    from edgekv.pictures.encoder import PictureEncoder
    from edgekv.pictures.patches import block_order, normalized, patches_of
    from edgekv.pictures.prompt import expand, place
    from edgekv.pictures.rows import Picture, PictureRows, PictureSize, Tile
    from edgekv.pictures.tiled import TiledPicture, TileGrid
    from edgekv.pictures.tiles import cut_tiles

__all__ = [
    "Picture",
    "PictureEncoder",
    "PictureFile",
    "PictureReader",
    "PictureRows",
    "PictureSize",
    "Tile",
    "TileGrid",
    "TiledPicture",
    "block_order",
    "cut_tiles",
    "expand",
    "normalized",
    "open_tiles",
    "patches_of",
    "picture_content",
    "place",
    "read_picture",
]

__getattr__ = lazy(
    __name__,
    {
        "apart": "PictureFile PictureReader open_tiles picture_content",
        "decode": "read_picture",
        "encoder": "PictureEncoder",
        "patches": "block_order normalized patches_of",
        "prompt": "expand place",
        "rows": "Picture PictureRows PictureSize Tile",
        "tiled": "TiledPicture TileGrid",
        "tiles": "cut_tiles",
    },
)
