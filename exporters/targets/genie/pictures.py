"""Pictures in Genie: a pipeline of an image encoder, a text encoder and a text generator, and its proof."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle
from edgekv.errors import BundleError
from edgekv.machine.scratch import scratch_folder
from edgekv.pictures import Picture, Tile, TiledPicture, TileGrid, expand, open_tiles
from edgekv.runtime import HtpEngine
from edgekv.spec import EncoderSpec, PictureSpec
from exporters.quantize.pictures import drawn_picture
from exporters.targets.genie.config import Dialog, Nodes
from exporters.targets.genie.dialog import GenieChild
from exporters.targets.genie.folder import GenieFolder, GenieVision
from exporters.targets.genie.worker import Piece
from exporters.targets.prove import own_tokens, prove

Tiles = NDArray[np.uint8]


class GeniePipeline(GenieChild):
    """Genie with an encoder for pictures; a context manager. Queries continue the conversation."""

    def __init__(self, folder: Path, nodes: Nodes, *, as_tokens: bool = False, arch: int | None = None) -> None:
        """Load the binaries that the nodes name.

        Args:
            folder: against which their paths are resolved.
            nodes: as `GenieFolder.nodes` gives them.
            as_tokens: whether answers are tokens instead of text.
            arch: HTP version of the binaries, for which this machine's libraries are checked; None for no check.

        Raises:
            EngineError: Genie is missing, refused the folder, or crashed, or the libraries here do not fit the HTP.
        """
        super().__init__(arch)
        files = (str(self._library), str(folder.absolute()), *(files.decode() for files in nodes.content()))
        try:
            self._do("create_pipeline", int(as_tokens), *files)
        except BaseException:
            self.close()
            raise

    def query(self, prompt: Sequence[str | NDArray[np.float32]]) -> Iterator[Piece]:
        """The answer to texts and pictures, the latter as `GenieVision.input_of` gives their tiles.

        Raises:
            EngineError: the prompt does not fit the context, or Genie failed.
        """
        with scratch_folder("genie") as scratch:
            for number, piece in enumerate(prompt):
                if isinstance(piece, str):
                    self._do("text", piece)
                else:
                    piece.tofile(file := scratch / f"{number}.raw")
                    self._do("image", str(file))
            yield from self._request("execute")


def pieces_of(
    text: str, pictures: Sequence[TiledPicture], encoder: EncoderSpec, spec: PictureSpec
) -> list[str | Tiles]:
    """A prompt as the texts and tiles that a pipeline is given one after the other.

    Args:
        text: with the picture's token where each stands, or with none to have them in front.
        pictures: in order.
        encoder: whose tiles are squares.
        spec: how a prompt names them.

    Raises:
        UsageError: the text has another number of these tokens.
    """
    rows, grid = encoder.rows, encoder.grid_of(encoder.image, encoder.image)
    opened = [Picture(tuple(Tile(tile, grid) for tile in shown.tiles), shown.grid) for shown in pictures]
    tiles = iter([tile for picture in pictures for tile in picture.tiles])
    pieces = list[str | Tiles]()
    for part in re.split(f"((?:{re.escape(spec.token)})+)", expand(text, opened, spec)):
        if part.startswith(spec.token):
            pieces += [next(tiles) for _ in range(part.count(spec.token) // rows)]
        elif part:
            pieces.append(part)
    return pieces


def prompt_of(folder: GenieFolder, text: str, files: Sequence[Path]) -> list[str | NDArray[np.float32]]:
    """A prompt with pictures from files.

    Raises:
        UsageError: the folder reads text alone, a picture cannot be read, or the text has another number of tokens for
            pictures.
    """
    vision = folder.vision()
    pictures = [open_tiles(file, "--image", vision.pictures, vision.encoder.image) for file in files]
    pieces = pieces_of(text, pictures, vision.encoder, vision.pictures)
    return [piece if isinstance(piece, str) else vision.input_of(piece) for piece in pieces]


def prove_pictures(
    folder: Path, generator: Dialog, vision: GenieVision, bundle: Bundle, engine: HtpEngine, count: int, context: int
) -> None:
    """Let Genie continue a prompt with a drawn tile greedily, and compare with edgekv's own loop.

    Args:
        folder: the folder.
        generator: what ends no text, and chooses greedily.
        vision: its encoder.
        bundle: the source of the folder.
        engine: for edgekv's own loop.
        count: of tokens to compare.
        context: that Genie uses.

    Raises:
        BundleError: the context has no room for a tile and some text.
        EngineError: Genie refused the folder, crashed, or chose other tokens.
    """
    tile, edge, tokenizer = drawn_picture(0, vision.encoder.image), vision.encoder.image, bundle.tokenizer()
    shown = TiledPicture((tile,), TileGrid((edge, edge)))
    pieces = pieces_of(f"See {vision.pictures.token} and say:", [shown], vision.encoder, vision.pictures)
    ids = list[int]()
    for piece in pieces:
        if isinstance(piece, str):
            ids += tokenizer.encode(piece, add_special_tokens=False).ids
        else:
            ids += Tile(piece, vision.encoder.grid_of(edge, edge)).ids
    largest = max(graph.ar for graph in bundle.manifest.graphs)
    if (needed := len(ids) + count + largest) > context:
        raise BundleError(
            "context",
            got=context,
            expected=f"at least {needed}, for a tile of {vision.encoder.rows} rows and some text",
            fix=f"Export the bundle with --context {needed} or more.",
        )
    expected = own_tokens(bundle, engine, ids, count, tiles=[tile])
    told = list[int]()
    dialog = msgspec.structs.replace(generator, max_num_tokens=count)
    with GeniePipeline(folder, Nodes.of(dialog), as_tokens=True) as genie:
        for tokens in genie.query(
            [
                piece_or_tile if isinstance(piece_or_tile, str) else vision.input_of(piece_or_tile)
                for piece_or_tile in pieces
            ]
        ):
            told += map(int, tokens)
    prove("Genie", {"tokens behind a picture": told}, {"tokens behind a picture": expected})
