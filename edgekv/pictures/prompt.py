"""Where pictures stand in a prompt: as text that the tokenizer reads, then as ids of rows."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.errors import UsageError
from edgekv.pictures.rows import Picture, PictureSize
from edgekv.spec import PictureSpec


def expand(text: str, pictures: Sequence[Picture | PictureSize], spec: PictureSpec, field: str = "prompt") -> str:
    """A prompt in which each picture's mark is replaced by the tokens of its rows, as transformers' processor does.

    A prompt without any mark has all pictures in front, as `PictureSpec.written`; messages have one for each.

    Raises:
        UsageError: the text has another number of marks.
    """
    mark = spec.mark
    count = text.count(mark)
    if not count and field == "prompt":
        text, count = (spec.written or mark) * len(pictures) + text, len(pictures)
    if count != len(pictures):
        expected = f"{len(pictures)}, one for each picture"
        fix = f"Write {mark} where each picture stands, or nowhere to have them in front of a prompt."
        raise UsageError(field, got=f"{count} times {mark}", expected=expected, fix=fix)
    first, *rest = text.split(mark)
    return first + "".join(_written(picture, spec) + part for picture, part in zip(pictures, rest, strict=True))


def _written(picture: Picture | PictureSize, spec: PictureSpec) -> str:
    grid, (*tiles, last) = picture.grid, (spec.token * rows for rows in picture.rows)
    if spec.layout == "joined":
        return f"{spec.begin}{''.join([*tiles, last])}{spec.end}"
    places = [(row + 1, column + 1) for row in range(grid.rows) for column in range(grid.columns)]
    if spec.layout == "marked":
        if not tiles:
            return f"{spec.begin}{last}{spec.end}"
        marked = (f"<|img_row_{row}_col_{column}|>{tile}" for (row, column), tile in zip(places, tiles, strict=True))
        return f"{spec.begin}{''.join(marked)}{spec.whole}{last}{spec.end}"
    whole = f"{spec.begin}{spec.whole}{last}{spec.end}"
    if not tiles:
        return whole
    numbered = [
        f"{spec.begin}<row_{row}_col_{column}>{tile}" for (row, column), tile in zip(places, tiles, strict=True)
    ]
    lines = ["".join(numbered[first : first + grid.columns]) for first in range(0, len(tiles), grid.columns)]
    return "\n".join([*lines, "", whole])


def place(tokens: Sequence[int], pictures: Sequence[Picture], spec: PictureSpec, field: str = "prompt") -> list[int]:
    """The tokens of an expanded prompt with the ids of rows in place of the pictures' token.

    Raises:
        UsageError: there are more or fewer of these than rows.
    """
    ids = [id for picture in pictures for tile in picture.tiles for id in tile.ids]
    places = [at for at, token in enumerate(tokens) if token == spec.token_id]
    if len(places) != len(ids):
        expected = f"{len(ids)}, one for each row of {len(pictures)} pictures"
        fix = f"Write {spec.token} once for each picture, and nowhere else."
        raise UsageError(field, got=f"{len(places)} times the token {spec.token}", expected=expected, fix=fix)
    placed = [*tokens]
    for at, id in zip(places, ids, strict=True):
        placed[at] = id
    return placed
