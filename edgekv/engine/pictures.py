"""Pictures of requests: opened for a bundle, put into prompts, and refused where nothing reads them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from edgekv.bundle import Bundle, Manifest
from edgekv.engine.request import Request
from edgekv.errors import UsageError, refuse
from edgekv.kv import Policy
from edgekv.pictures import (
    Picture,
    PictureFile,
    PictureReader,
    PictureRows,
    PictureSize,
    expand,
    picture_content,
    place,
)
from edgekv.spec import PictureSpec
from edgekv.spec.chat import IMAGE_PART, Message, pictures_in
from edgekv.spec.text import as_plain
from edgekv.text.params import BeamParams

PictureSource = Path | str | bytes
"""A file, or its content."""
_KEPT_BYTES = 1 << 26
"""Of the pictures that were opened last: the next turn of a conversation neither decodes nor encodes them again."""


@dataclass(frozen=True, slots=True)
class PictureSent:
    """A picture of a request.

    Attributes:
        content: of its file.
        field: for errors.
        is_split: whether it is cut as the checkpoint says; else the whole picture is its only tile.
    """

    content: bytes
    field: str
    is_split: bool = True


class PictureOpening:
    """Opens pictures of a request: their headers are read before any of them is decoded.

    Attributes:
        sent: the pictures.
        opened: so far, and those that need not be decoded; None for the others.
    """

    def __init__(
        self,
        sent: Sequence[PictureSent],
        kept: list[Picture | None],
        reader: PictureReader,
        rows: PictureRows,
        salt: str | None,
    ) -> None:
        self.sent = sent
        self.opened = kept
        self._reader = reader
        self._rows = rows
        self._salt = salt

    def size(self, number: int) -> Picture | PictureSize:
        """What says how many tokens a picture has.

        Raises:
            UsageError: it is refused by what its headers say.
            EngineError: Pillow is not installed.
        """
        return self.opened[number] or PictureSize.of(self._reader.grid(number), self._rows.encoder.spec)

    def open(self, number: int) -> Picture:
        """A picture, resized and cut into tiles; its rows are computed when they are run.

        Raises:
            UsageError: it cannot be read.
            EngineError: Pillow is not installed.
        """
        picture = self.opened[number]
        if picture is None:
            picture = self.opened[number] = self._rows.open(self._reader.open(number), self._salt)
        return picture

    def stop(self) -> None:
        """Let no further picture be read, from any thread."""
        self._reader.stop()


class Pictures:
    """Opens pictures for a bundle, and puts them into prompts. Thread-safe."""

    def __init__(self, bundle: Bundle, rows: PictureRows | None, read: Callable[[str, str], object]) -> None:
        """Open none yet.

        Args:
            bundle: any.
            rows: None if it reads text alone.
            read: refuses a prompt that is longer than the context, or than its policy lets it be; see `Texts.read`.
        """
        self._bundle = bundle
        self._read = read
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
            got = f"a picture for {self._bundle.path.name}, which reads text alone"
            raise UsageError("pictures", got=got, expected="text", fix=fix)
        return vision.pictures

    def open(
        self, sources: Sequence[PictureSource | Picture], fields: Sequence[str], *, salt: str | None = None
    ) -> Iterator[Picture]:
        """Pictures of a prompt, resized and cut into tiles; their rows are computed when they are run.

        Their tokens are counted by their headers before the first of them is decoded.

        Args:
            sources: files, their content, or what is open already.
            fields: of each, for errors.
            salt: see `opening`.

        Raises:
            UsageError: the bundle reads text alone, or a picture cannot be read; see `PictureReader`.
            ContextFullError: they have more tokens than the context.
            EngineError: Pillow is not installed.
        """
        if not sources:
            return
        _ = self.spec
        files = [
            PictureSent(picture_content(Path(source) if isinstance(source, str) else source, field), field)
            for source, field in zip(sources, fields, strict=True)
            if not isinstance(source, Picture)
        ]
        with self.opening(files, salt) as opening:
            sizes = [opening.size(number) for number in range(len(files))]
            shown = [*sizes, *(source for source in sources if isinstance(source, Picture))]
            self._read(expand("", shown, self.spec), "pictures")  # counts the tokens
            numbers = iter(range(len(files)))
            for source in sources:
                yield source if isinstance(source, Picture) else opening.open(next(numbers))

    @contextmanager
    def opening(self, sent: Sequence[PictureSent], salt: str | None = None) -> Iterator[PictureOpening]:
        """What opens pictures, until the block ends. Those that were opened last need not be decoded again.

        Args:
            sent: the pictures.
            salt: what one user has sent makes nothing faster for users of other salts.

        Raises:
            UsageError: the bundle reads text alone.
        """
        spec, rows = self.spec, self._rows
        assert rows is not None, "it has a spec"
        whole = msgspec.structs.replace(spec, tiling="none")
        files = [PictureFile(picture.content, picture.field, spec if picture.is_split else whole) for picture in sent]
        keys = [_key(picture, salt) for picture in sent]
        with self._lock:
            kept = [self._kept.get(key) for key in keys]
        with PictureReader(files, rows.encoder.spec.image) as reader:
            opening = PictureOpening(sent, kept, reader, rows, salt)
            try:
                yield opening
            finally:
                for key, picture in zip(keys, opening.opened, strict=True):
                    if picture is not None:
                        self._keep(key, picture)

    def _keep(self, key: bytes, picture: Picture) -> None:
        with self._lock:
            self._kept[key] = picture
            self._kept.move_to_end(key)
            held = sum(tile.nbytes for picture in self._kept.values() for tile in picture.tiles)
            while held > _KEPT_BYTES and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                held -= sum(tile.nbytes for tile in dropped.tiles)

    def expanded(self, text: str, pictures: Sequence[Picture | PictureSize], field: str = "messages") -> str:
        """See `expand`; a text without pictures stays as it is.

        Raises:
            UsageError: as `expand`.
        """
        return expand(text, pictures, self.spec, field) if pictures else text

    def rendered(
        self,
        messages: Sequence[Message],
        pictures: Sequence[Picture | PictureSize],
        render: Callable[[Sequence[Message]], str],
    ) -> str:
        """The text of messages with pictures, as `expanded` gives it.

        Where parts of messages stand for the pictures, the model's token for one is ordinary text in them. Pictures of
        tools' results that a template does not show are told by the user behind them.

        Args:
            messages: the conversation.
            pictures: those of its parts, in order.
            render: the text of messages.

        Raises:
            UsageError: as `render` or `expand`.
        """
        if not pictures:
            return render(messages)
        if not pictures_in(messages):
            return self.expanded(render(messages), pictures)
        token = self.spec.mark
        try:
            told = as_plain(messages, token)
            if token != self.spec.token:
                told = as_plain(told, self.spec.token)
        except RecursionError:
            refuse(
                "messages", "values nested too deep", "messages that can be searched for pictures", "Nest them less."
            )
        moved = _told_by_user(told)
        try:
            text = render(told)
        except UsageError:
            if moved == told:
                raise
            text = render(moved)
        if moved != told and text.count(token) != len(pictures):
            text = render(moved)
        return self.expanded(text, pictures)

    def put(self, tokens: Sequence[int], pictures: Sequence[Picture], field: str = "messages") -> tuple[int, ...]:
        """See `place`.

        Raises:
            UsageError: as `place`.
        """
        return tuple(place(tokens, pictures, self.spec, field) if pictures else tokens)


def _key(sent: PictureSent, salt: str | None) -> bytes:
    """What a picture is kept by: a hash of its file, of how it is cut, and of the salt."""
    key = b"" if salt is None else blake2b(salt.encode(), digest_size=32).digest()
    return blake2b(sent.content, digest_size=16, salt=b"split" if sent.is_split else b"", key=key).digest()


def _told_by_user(messages: Sequence[Message]) -> list[Message]:
    """The messages with the pictures of tools' results in a message of the user behind them."""
    told: list[Message] = []
    waiting: list[Any] = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if waiting and role == "user":
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            message, waiting = {**message, "content": [*waiting, *parts]}, []
        elif waiting and role != "tool":
            told.append({"role": "user", "content": waiting})
            waiting = []
        if role == "tool" and isinstance(content, list) and pictures_in([message]):
            parts = [part for part in content if isinstance(part, dict)]
            shown = [part for part in parts if part.get("type") == IMAGE_PART]
            text = "".join(str(part.get("text", "")) for part in parts if part not in shown)
            message, waiting = {**message, "content": text}, [*waiting, *shown]
        told.append(message)
    return [*told, {"role": "user", "content": waiting}] if waiting else told


def check_pictured(request: Request, manifest: Manifest, policy: Policy) -> None:
    """Refuse what cannot read pictures.

    Raises:
        UsageError: a beam search, a draft model, or a context policy that renumbers tokens whose positions rows of
            pictures have moved.
    """
    if manifest.model.picture_axes and policy.inverse_frequencies:
        got = f"some with the context policy {policy.name}, which renumbers tokens"
        needed = "a policy that lets them keep their positions: rows of pictures have one for each axis"
        raise UsageError("pictures", got=got, expected=needed, fix="Use fail, sliding-window or keydiff.")
    other = ""
    if isinstance(request.params, BeamParams):
        other = "a beam search"
    elif request.speculation is not None and request.speculation.draft is not None:
        other = "a draft model"
    if other:
        fix = "Leave one of them out."
        raise UsageError("pictures", got=f"some with {other}", expected="one of them", fix=fix)
