"""Pictures of requests: opened for a bundle, put into prompts, and refused where nothing reads them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Lock

import msgspec

from edgekv.bundle import Bundle
from edgekv.engine.request import Request
from edgekv.errors import UsageError
from edgekv.pictures import Picture, PictureRows, expand, open_tiles, picture_content, place
from edgekv.spec import PictureSpec
from edgekv.text.params import BeamParams

PictureSource = Path | str | bytes
"""A file, or its content."""
_KEPT_BYTES = 1 << 26
"""Of the pictures that were opened last: the next turn of a conversation neither decodes nor encodes them again."""


class Pictures:
    """Opens pictures for a bundle, and puts them into prompts. Thread-safe."""

    def __init__(self, bundle: Bundle, rows: PictureRows | None) -> None:
        """Args: bundle: any. rows: None if it reads text alone."""
        self._bundle = bundle
        self._rows = rows
        self._lock = Lock()
        self._kept: OrderedDict[bytes, Picture] = OrderedDict()  # by a hash of the file, the last used at the end

    @property
    def are_read(self) -> bool:
        """Whether the bundle reads more than text."""
        return self._bundle.manifest.vision is not None

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

    def open(self, source: PictureSource, field: str = "picture", *, is_split: bool = True) -> Picture:
        """A picture, resized and cut into tiles; its rows are computed when they are run.

        Args:
            source: a file, or its content.
            field: for errors.
            is_split: whether it is cut as the checkpoint says; else the whole picture is its only tile.

        Raises:
            UsageError: the bundle reads text alone, or the picture cannot be read; see `open_tiles`.
            EngineError: Pillow is not installed.
        """
        spec, rows = self.spec, self._rows
        assert rows is not None, "it has a spec"
        content = picture_content(Path(source) if isinstance(source, str) else source, field)
        key = blake2b(content, digest_size=16, salt=b"split" if is_split else b"").digest()
        with self._lock:
            found = self._kept.get(key)
        if found is None:
            cut = spec if is_split else msgspec.structs.replace(spec, tiling="none")
            found = rows.open(open_tiles(content, field, cut, rows.encoder.spec.image))
        self._keep(key, found)
        return found

    def _keep(self, key: bytes, picture: Picture) -> None:
        with self._lock:
            self._kept[key] = picture
            self._kept.move_to_end(key)
            held = sum(tile.nbytes for each in self._kept.values() for tile in each.tiles)
            while held > _KEPT_BYTES and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                held -= sum(tile.nbytes for tile in dropped.tiles)

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
