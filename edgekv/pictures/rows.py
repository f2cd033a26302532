"""Rows of pictures under token ids of their own, so that caches and prefix keys tell pictures apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import EmbeddingTable
from edgekv.pictures.encoder import EncodedRows, PictureEncoder
from edgekv.pictures.positions import FIRST_ID, Places, axis_positions, row_places
from edgekv.spec import EncoderSpec
from quant import DTYPES, Encoding

if TYPE_CHECKING:
    from edgekv.pictures.tiled import TiledPicture, TileGrid


class Tile:
    """A tile `[height, width, 3]` of a picture.

    Its rows are computed when the first of them is run, and its pixels freed then.

    Attributes:
        ids: of its rows, from a hash of its pixels and of the salt: users of different salts share no rows.
        encode_ms: time of the encoder; 0 if it has not run.
        places: of its rows; see `row_places`.
    """

    def __init__(self, pixels: NDArray[np.uint8], grid: tuple[int, int], salt: str | None = None) -> None:
        """Args: pixels: of it. grid: of its rows, see `EncoderSpec.grid_of`. salt: of its user."""
        self.places = row_places(*grid)
        rows = len(self.places)
        key = b"" if salt is None else hashlib.blake2b(salt.encode(), digest_size=32).digest()
        shape = b"%d" % pixels.shape[0]  # with the number of bytes it is the tile's
        digest = hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=32, key=key, salt=shape).digest()
        hashed = np.frombuffer(hashlib.shake_128(digest).digest(8 * rows), ">u8") >> np.uint64(2)
        self.ids: tuple[int, ...] = tuple(FIRST_ID | int(number) for number in hashed)
        self.encode_ms = 0.0
        self._pixels: NDArray[np.uint8] | None = pixels
        self._rows: EncodedRows | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held: pixels, or rows once it is encoded."""
        held = (self._pixels,) if self._rows is None else self._rows
        return sum(int(array.nbytes) for array in held if array is not None)

    def rows(self, encoder: PictureEncoder) -> EncodedRows:
        """All of its rows, as graphs read them."""
        if self._rows is None:
            assert self._pixels is not None, "it has one of both"
            started = perf_counter_ns()
            self._rows = encoder.encode(self._pixels)
            self.encode_ms = (perf_counter_ns() - started) / 1e6
            self._pixels = None
        return self._rows


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that is ready to stand in a prompt."""

    tiles: tuple[Tile, ...]
    grid: TileGrid

    def __str__(self) -> str:
        (width, height), grid = self.grid.size, self.grid
        tiles = f"{grid.columns} x {grid.rows} tiles and the whole" if grid.rows else "1 tile"
        if grid.whole is not None and not grid.rows:
            tiles = f"shown as {grid.whole[0]} x {grid.whole[1]}"
        return f"{width} x {height} pixels, {tiles}, {self.tokens} tokens"

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each tile."""
        return tuple(len(tile.ids) for tile in self.tiles)

    @property
    def tokens(self) -> int:
        """Rows of all tiles."""
        return sum(len(tile.ids) for tile in self.tiles)


@dataclass(frozen=True, slots=True)
class PictureSize:
    """A picture of which the headers alone were read: enough to count its tokens.

    Attributes:
        grid: how it is cut.
        rows: of each tile.
    """

    grid: TileGrid
    rows: tuple[int, ...]

    @classmethod
    def of(cls, grid: TileGrid, encoder: EncoderSpec) -> PictureSize:
        """That of a picture that is cut so."""
        return cls(grid, tuple(encoder.rows_of(*size) for size in grid.tile_sizes(encoder.image)))


class PictureRows:
    """The embeddings of tokens and of rows of pictures; a request holds the tiles of its prompt.

    Any thread may open pictures; rows are computed by the one that drives the engine.

    Attributes:
        encoder: computes rows.
    """

    def __init__(self, table: EmbeddingTable, encoder: PictureEncoder) -> None:
        self.encoder = encoder
        self._table = table
        self._lock = Lock()
        self._tiles: WeakValueDictionary[int, Tile] = WeakValueDictionary()  # by the ids of their rows

    def open(self, picture: TiledPicture, salt: str | None = None) -> Picture:
        """A picture with the ids of its rows; tiles that somebody with the same salt holds are the same objects."""
        spec = self.encoder.spec
        tiles = [Tile(pixels, spec.grid_of(pixels.shape[1], pixels.shape[0]), salt) for pixels in picture.tiles]
        with self._lock:
            return Picture(tuple(map(self._shared, tiles)), picture.grid)

    def _shared(self, tile: Tile) -> Tile:
        tile = self._tiles.get(tile.ids[0], tile)
        self._tiles.update(dict.fromkeys(tile.ids, tile))
        return tile

    def rows(self, tokens: Sequence[int]) -> NDArray[Any]:
        """The embeddings of tokens as graphs read them, `[T, hidden]`."""
        ids = np.asarray(tokens, np.int64)
        pictured = np.flatnonzero(ids >= FIRST_ID)
        if not len(pictured):
            return self._table.rows(ids)
        rows = self._table.rows(np.where(ids >= FIRST_ID, 0, ids))
        for at in pictured:
            tile, row = self.tile_of(int(ids[at]))
            rows[at] = tile.rows(self.encoder).embeddings[row]
        return rows

    def place(self, id: int) -> tuple[int, int, int]:
        """Row and column of a row of a picture, and how far the text moves on behind it; see `row_places`."""
        tile, row = self.tile_of(id)
        down, across, moves = tile.places[row].tolist()
        return down, across, moves

    def positions(self, tokens: Sequence[int]) -> Places | None:
        """See `axis_positions`; None if no token is a row of a picture."""
        if not tokens or max(tokens) < FIRST_ID:
            return None
        places = np.zeros((len(tokens), 3), np.int64)
        places[:, 2] = 1
        for at, token in enumerate(tokens):
            if token >= FIRST_ID:
                places[at] = self.place(token)
        return axis_positions(places)

    def whole(self, tokens: Sequence[int]) -> list[slice]:
        """Where tokens that follow each other are rows of one tile."""
        tiles, at = list[slice](), 0
        while at < len(tokens):
            end = at + 1
            if tokens[at] >= FIRST_ID:
                end = self.tile_end(tokens, at)
                tiles.append(slice(at, end))
            at = end
        return tiles

    def cut(self, tokens: Sequence[int], end: int) -> int:
        """The last place among tokens, at or before `end`, where no tile is cut; 0 if they begin within that tile."""
        if not 0 < end < len(tokens) or tokens[end] < FIRST_ID:
            return end
        return max(end - self.tile_of(tokens[end])[1], 0)

    def tile_end(self, tokens: Sequence[int], at: int) -> int:
        """Where the tile ends that has the row `at`, or where the tokens do."""
        tile, row = self.tile_of(tokens[at])
        return min(at + len(tile.ids) - row, len(tokens))

    def tile_of(self, id: int) -> tuple[Tile, int]:
        """The tile of a row, and the row's number there."""
        tile = self._tiles[id]
        return tile, tile.ids.index(id)


class PictureLayerRows:
    """What layers of a decoder read of tokens, or add behind them: of rows of pictures what the encoder gives."""

    def __init__(self, pictures: PictureRows, width: int, encoding: Encoding, table: EmbeddingTable | None) -> None:
        """Args: pictures: have the rows. width: of those of all layers. encoding: of the graphs' input. table: of
        tokens; None for nothing.
        """
        self._pictures = pictures
        self._table = table
        self._nothing = np.full(width, encoding.zero_point, DTYPES[encoding.dtype])

    def rows(self, tokens: Sequence[int]) -> NDArray[Any]:
        """As graphs read them, `[T, width]`."""
        if self._table is None:
            rows = np.tile(self._nothing, (len(tokens), 1))
        else:
            ids = np.asarray(tokens, np.int64)
            rows = self._table.rows(np.where(ids >= FIRST_ID, 0, ids))
        for at, token in enumerate(tokens):
            if token >= FIRST_ID:
                tile, row = self._pictures.tile_of(token)
                behind = tile.rows(self._pictures.encoder).behind
                assert behind is not None, "an encoder with such rows"
                rows[at] = behind[row]
        return rows
