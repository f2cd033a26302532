"""What commands that take pictures have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

from edgekv.cli.output import Output
from edgekv.option import Option

if TYPE_CHECKING:
    from edgekv.model import Model
    from edgekv.pictures import Picture, Tile

ImageOption = Annotated[
    Sequence[Path],
    Option(
        "A picture (PNG, JPEG, WebP, GIF or BMP) for a bundle with a vision encoder; repeat for several. Each takes "
        "the place of the model's picture token in the prompt, such as <image>, or stands in front.",
        metavar="FILE",
        subjects=("pictures",),
    ),
]


def opened_pictures(files: Sequence[Path], model: Model, output: Output, field: str = "--image") -> list[Picture]:
    """The pictures of an option or a command; a line for each goes to standard error.

    Raises:
        EdgeKVError: as `Pictures.open`.
    """
    pictures: list[Picture] = []
    started = perf_counter()
    for file, picture in zip(files, model.pictures.open(files, [field] * len(files)), strict=True):
        pictures.append(picture)
        output.note(f"[{file.name}: {picture}, resized in {1e3 * (perf_counter() - started):.0f} ms]")
        started = perf_counter()
    return pictures


def waiting_tiles(pictures: Sequence[Picture]) -> list[Tile]:
    """The tiles that no encoder has run."""
    tiles = dict.fromkeys(tile for picture in pictures for tile in picture.tiles)
    return [tile for tile in tiles if not tile.encode_ms]


def encoder_line(pictures: Sequence[Picture], waiting: Sequence[Tile]) -> str:
    """How long the encoder ran, and for how many of the tiles that were waiting before."""
    encoded = [tile for tile in waiting if tile.encode_ms]
    seconds = sum(tile.encode_ms for tile in encoded) / 1e3
    others = sum(len(picture.tiles) for picture in pictures) - len(encoded)
    count = "1 tile" if len(encoded) == 1 else f"{len(encoded)} tiles"
    return f"[vision encoder: {count} in {seconds:.2f} s{f', {others} known' if others else ''}]"
