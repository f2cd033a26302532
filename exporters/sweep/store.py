"""Finished pieces of sweeps by key, in a folder that all machines share or at an fsspec URL."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import msgspec

from edgekv.bundle import FileRecord, atomic_file, file_hashes, is_plain_path, record_files
from edgekv.errors import EdgeKVError, ServiceError, UsageError
from edgekv.json_file import decode_json, read_json
from edgekv.system import cache_folder

RECORD = "piece.json"
_WHOLE = "the record of a finished piece"
_AGAIN = "Run the same command again: it is made again."

T = TypeVar("T")


class PieceRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished piece.

    Attributes:
        kind: of the work.
        seconds: that it took.
        files: sizes and hashes of its files.
        answer: what it found, as JSON.
        sha256: of the other fields.

    Raises:
        ValueError: a file is outside of the piece, or the hash is that of other fields.
    """

    kind: str
    seconds: float
    files: dict[str, FileRecord]
    answer: msgspec.Raw
    sha256: str

    def __post_init__(self) -> None:
        for name in self.files:
            if not is_plain_path(name):
                raise ValueError(f"files: got {name!r}; expected plain paths inside the piece")
        if self.sha256 != (wanted := _seal(self.kind, self.seconds, self.files, self.answer)):
            raise ValueError(f"sha256: got {self.sha256!r}; expected {wanted}, for the other fields")

    @classmethod
    def of(cls, folder: Path, kind: str, seconds: float, answer: object) -> PieceRecord:
        """The record of the files in a folder, and of an answer."""
        files, raw = record_files(folder), msgspec.Raw(msgspec.json.encode(answer))
        return cls(kind=kind, seconds=seconds, files=files, answer=raw, sha256=_seal(kind, seconds, files, raw))


def _seal(kind: str, seconds: float, files: Mapping[str, FileRecord], answer: msgspec.Raw) -> str:
    return hashlib.sha256(msgspec.json.encode((kind, seconds, files, answer))).hexdigest()


@dataclass(frozen=True, slots=True)
class PieceStore:
    """Pieces are folders; each appears complete or not at all, and none is changed afterwards.

    At a path they are used in place. At a URL they are copied to and from a folder of the machine, and the record is
    written last.

    Attributes:
        place: a path, or a URL such as `s3://bucket/sweeps`.
        cache: of this machine, for URLs; None for `pieces` in EDGEKV_CACHE_DIR or the user's cache directory.
    """

    place: str
    cache: Path | None = None

    @property
    def is_remote(self) -> bool:
        """Whether the place is a URL."""
        return "://" in self.place

    @property
    def folder(self) -> Path:
        """Where this machine has pieces."""
        return (self.cache or cache_folder() / "pieces") if self.is_remote else Path(self.place)

    def find(self, key: str) -> PieceRecord | None:
        """The record of a finished piece; None if the place has none, or a damaged one.

        Of a URL only the record is read: `path` checks the files.
        """
        return self._record(key) if self.is_remote else _intact(self.folder / key)

    def seconds(self, key: str) -> float:
        """The time that a finished piece took; 0 if it is not there."""
        record = self._record(key)
        return 0.0 if record is None else record.seconds

    def answer(self, key: str, kind: type[T]) -> T:
        """What a finished piece found.

        Raises:
            UsageError: it is not there, or found something else.
        """
        record = self._record(key)
        if record is None:
            raise self._missing(key)
        return decode_json(
            bytes(record.answer),
            kind,
            field=f"piece {key}",
            expected=f"what a {record.kind} piece finds",
            fix=f"Remove the piece from {self.place}, and run the same command again.",
            error=UsageError,
        )

    def path(self, key: str) -> Path:
        """The folder of a finished piece on this machine, fetched if it is elsewhere.

        Raises:
            UsageError: it is not there, or damaged.
            ServiceError: it is damaged at the URL; it is removed there.
        """
        folder = self.folder / key
        if _intact(folder) is not None:
            return folder
        record = self.find(key) if self.is_remote else None
        if record is None:
            raise self._missing(key)
        system, root = self._system(f"/{key}")
        partial = self._partial()
        try:
            for name in [*record.files, RECORD]:
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                system.get_file(f"{root}/{name}", str(partial / name))
            if _intact(partial) is None:
                with suppress(Exception):  # each file system has errors of its own
                    system.rm_file(f"{root}/{RECORD}")
                found = f"damaged files in {self.place}"
                raise ServiceError(f"piece {key}", got=found, expected="those of its record", fix=_AGAIN)
            _put(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return folder

    def files(self, key: str) -> dict[str, Path]:
        """The files of a finished piece on this machine, by their path inside the piece; see `path`."""
        folder = self.path(key)
        record = _read(folder)
        return {} if record is None else {name: folder / name for name in record.files}

    def make(self, key: str, kind: str, work: Callable[[Path], object]) -> PieceRecord:
        """Do a piece of work, unless it is finished.

        Args:
            key: of the piece.
            kind: of the work.
            work: writes files into a folder and returns what it found, for JSON.
        """
        if (found := self.find(key)) is not None:
            return found
        if (kept := _intact(self.folder / key)) is not None:  # made for another place
            self._publish(key, self.folder / key, kept)
            return kept
        partial, start = self._partial(), perf_counter()
        try:
            answer = work(partial)
            record = PieceRecord.of(partial, kind, round(perf_counter() - start, 3), answer)
            (partial / RECORD).write_bytes(msgspec.json.encode(record))
            self._publish(key, partial, record)
            _put(partial, self.folder / key)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return record

    def check(self) -> None:
        """Check that the place can be written.

        Raises:
            UsageError: it cannot, or its package is missing.
        """
        try:
            if self.is_remote:
                system, root = self._system("")
                system.makedirs(root, exist_ok=True)
                system.pipe_file(f"{root}/.reached", b"")
            else:
                self.folder.mkdir(parents=True, exist_ok=True)
                with atomic_file(self.folder / ".reached") as partial:
                    partial.touch()
        except Exception as error:  # each file system has errors of its own
            raise UsageError(
                f"--store {self.place}",
                got=f"{type(error).__name__}: {error}",
                expected="a folder or an fsspec URL that can be written",
                fix="Check the path, the credentials, and that the URL's package is installed, such as s3fs.",
            ) from None

    def _publish(self, key: str, folder: Path, record: PieceRecord) -> None:
        """Copy a piece to the URL, if the place is one."""
        if self.is_remote:
            system, root = self._system(f"/{key}")
            for name in [*record.files, RECORD]:
                system.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
                system.put_file(str(folder / name), f"{root}/{name}")

    def _record(self, key: str) -> PieceRecord | None:
        if not self.is_remote:
            return _read(self.folder / key)
        system, root = self._system(f"/{key}")
        try:
            raw = system.cat_file(f"{root}/{RECORD}")
            return decode_json(raw, PieceRecord, field=f"{root}/{RECORD}", expected=_WHOLE, fix=_AGAIN)
        except (OSError, EdgeKVError):
            return None

    def _missing(self, key: str) -> UsageError:
        return UsageError(
            f"piece {key}",
            got=f"nothing whole in {self.place}",
            expected="a finished piece",
            fix="Run the same command again; give workers a folder or URL that all of them reach.",
        )

    def _system(self, inner: str) -> tuple[Any, str]:
        import fsspec

        system, root = fsspec.core.url_to_fs(self.place + inner)
        system.invalidate_cache()
        return system, root

    def _partial(self) -> Path:
        """A new folder; its name is unique among machines."""
        partial = self.folder / f".partial-{os.getpid()}-{uuid.uuid4().hex}"
        partial.mkdir(parents=True)
        return partial


def _read(folder: Path) -> PieceRecord | None:
    try:
        return read_json(folder / RECORD, PieceRecord, expected=_WHOLE, fix=_AGAIN)
    except EdgeKVError:
        return None


def _intact(folder: Path) -> PieceRecord | None:
    """The record of a piece; None if there is none, or one of its files is missing or damaged."""
    if (record := _read(folder)) is None:
        return None
    try:
        with file_hashes() as hashes:
            for name, file in record.files.items():
                if (folder / name).stat().st_size != file.bytes or hashes.sha256_of(folder / name) != file.sha256:
                    return None
    except OSError:
        return None
    return record


def _put(partial: Path, folder: Path) -> None:
    """Rename a complete folder; one that another process has put there meanwhile stays."""
    if folder.exists() and _intact(folder) is None:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        partial.rename(folder)
    except OSError:
        if _intact(folder) is None:
            raise
