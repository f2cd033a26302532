"""Where pictures stand in a prompt: as text that the tokenizer reads, then as ids of rows."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.errors import UsageError
from edgekv.pictures.rows import Picture, PictureSize
from edgekv.spec import PictureSpec


def expand(text: str, pictures: Sequence[Picture | PictureSize], spec: PictureSpec, field: str = "prompt") -> str:
    """A prompt in which each picture's token is replaced by those of its rows, as transformers' processor writes them.

    A prompt without any such token has all pictures in front; messages have one for each.

    Raises:
        UsageError: the text has another number of these tokens.
    """
    found = text.count(spec.token)
    if not found and field == "prompt":
        text, found = spec.token * len(pictures) + text, len(pictures)
    if found != len(pictures):
        wanted = f"{len(pictures)}, one for each picture"
        fix = f"Write {spec.token} where each picture stands, or nowhere to have them in front of a prompt."
        raise UsageError(field, got=f"{found} times {spec.token}", expected=wanted, fix=fix)
    first, *rest = text.split(spec.token)
    return first + "".join(_written(each, spec) + part for each, part in zip(pictures, rest, strict=True))


def _written(picture: Picture | PictureSize, spec: PictureSpec) -> str:
    grid, rows = picture.grid, spec.token * picture.tile_rows
    if not spec.numbered:
        return f"{spec.begin}{rows * grid.tiles}{spec.end}"
    whole = f"{spec.begin}{spec.whole}{rows}{spec.end}"
    if not grid.rows:
        return whole
    lines = [
        "".join(f"{spec.begin}<row_{row + 1}_col_{column + 1}>{rows}" for column in range(grid.columns))
        for row in range(grid.rows)
    ]
    return "\n".join([*lines, "", whole])


def place(tokens: Sequence[int], pictures: Sequence[Picture], spec: PictureSpec, field: str = "prompt") -> list[int]:
    """The tokens of an expanded prompt with the ids of rows in place of the pictures' token.

    Raises:
        UsageError: there are more or fewer of these than rows.
    """
    ids = [id for picture in pictures for tile in picture.tiles for id in tile.ids]
    wanted = [at for at, token in enumerate(tokens) if token == spec.token_id]
    if len(wanted) != len(ids):
        expected = f"{len(ids)}, one for each row of {len(pictures)} pictures"
        fix = f"Write {spec.token} once for each picture, and nowhere else."
        raise UsageError(field, got=f"{len(wanted)} times the token {spec.token}", expected=expected, fix=fix)
    found = [*tokens]
    for at, id in zip(wanted, ids, strict=True):
        found[at] = id
    return found
