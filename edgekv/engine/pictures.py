"""Pictures of requests: opened for a bundle, put into prompts, and refused where nothing reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgekv.bundle import Bundle
from edgekv.engine.request import Request
from edgekv.errors import UsageError
from edgekv.pictures import Picture, PictureRows, expand, open_tiles, place
from edgekv.spec import PictureSpec
from edgekv.text.params import BeamParams

PictureSource = Path | str | bytes
"""A file, or its content."""


class Pictures:
    """Opens pictures for a bundle, and puts them into prompts. Thread-safe."""

    def __init__(self, bundle: Bundle, rows: PictureRows | None) -> None:
        """Args: bundle: any. rows: None if it reads text alone."""
        self._bundle = bundle
        self._rows = rows

    @property
    def spec(self) -> PictureSpec:
        """How pictures are prepared.

        Raises:
            UsageError: the bundle reads text alone.
        """
        vision = self._bundle.manifest.vision
        if vision is None:
            fix = "Leave pictures out, or export a checkpoint with a vision encoder, such as SmolVLM2."
            found = f"a picture for {self._bundle.path.name}, which reads text alone"
            raise UsageError("pictures", got=found, expected="text", fix=fix)
        return vision.pictures

    def open(self, source: PictureSource, field: str = "picture") -> Picture:
        """A picture, resized and cut into tiles; its rows are computed when they are run.

        Raises:
            UsageError: the bundle reads text alone, or the picture cannot be read; see `open_tiles`.
            EngineError: Pillow is not installed.
        """
        spec, rows = self.spec, self._rows
        assert rows is not None, "it has a spec"
        found = Path(source) if isinstance(source, str) else source
        return rows.open(open_tiles(found, field, spec, rows.encoder.spec.image))

    def expanded(self, text: str, pictures: Sequence[Picture], field: str = "messages") -> str:
        """See `expand`; a text without pictures stays as it is.

        Raises:
            UsageError: as `expand`.
        """
        return expand(text, pictures, self.spec, field) if pictures else text

    def put(self, tokens: Sequence[int], pictures: Sequence[Picture], field: str = "messages") -> tuple[int, ...]:
        """See `place`.

        Raises:
            UsageError: as `place`.
        """
        return tuple(place(tokens, pictures, self.spec, field) if pictures else tokens)


def check_pictured(request: Request) -> None:
    """Refuse what cannot read pictures.

    Raises:
        UsageError: a beam search, or a draft model.
    """
    found = ""
    if isinstance(request.params, BeamParams):
        found = "a beam search"
    elif request.speculation is not None and request.speculation.draft is not None:
        found = "a draft model"
    if found:
        fix = "Leave one of them out."
        raise UsageError("pictures", got=f"some with {found}", expected="one of them", fix=fix)
