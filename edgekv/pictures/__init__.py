"""Pictures in prompts: decoded, cut into tiles, encoded, and named by token ids of their own."""

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from edgekv.pictures.decode import read_picture as read_picture
    from edgekv.pictures.decoder_child import (
        PictureFile as PictureFile,
        PictureReader as PictureReader,
        open_tiles as open_tiles,
        picture_content as picture_content,
    )
    from edgekv.pictures.encoder import PictureEncoder as PictureEncoder
    from edgekv.pictures.patches import (
        EncoderInputs as EncoderInputs,
        block_order as block_order,
        encoder_inputs as encoder_inputs,
        graph_inputs as graph_inputs,
        normalized as normalized,
    )
    from edgekv.pictures.positions import (
        PositionOffsets as PositionOffsets,
        axis_positions as axis_positions,
        row_places as row_places,
    )
    from edgekv.pictures.prompt import expand as expand, place as place
    from edgekv.pictures.rows import (
        Picture as Picture,
        PictureLayerRows as PictureLayerRows,
        PictureRows as PictureRows,
        PictureSize as PictureSize,
        Tile as Tile,
    )
    from edgekv.pictures.tiled import TiledPicture as TiledPicture, TileGrid as TileGrid
    from edgekv.pictures.tiles import cut_tiles as cut_tiles

__getattr__, __all__ = lazy(__name__, __file__)
