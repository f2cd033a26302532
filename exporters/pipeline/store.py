"""Finished pieces by name: the only thing that an interrupted command goes on from."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import msgspec

from edgekv.bundle import FileRecord, file_hashes, is_plain_path, record_files, remove_directory
from edgekv.errors import EdgeKVError, ServiceError, UsageError
from edgekv.machine.json_file import decode_json, read_json
from edgekv.machine.scratch import NEW, atomic_file, held_folder, remove_abandoned
from edgekv.machine.system import CACHE_VARIABLE, cache_folder
from exporters.resources import full_disk_named

RECORD = "piece.json"
_WHOLE = "the record of a finished piece"
_AGAIN = "Run the same command again: it is made again."
_PARTIAL = ".partial"
_proven: dict[Path, list[tuple[str, int, int, int]]] = {}  # files that this process has hashed

T = TypeVar("T")


class MissingPieceError(UsageError):
    """A piece that was finished is not there any more, or damaged."""


class PieceRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished piece.

    Attributes:
        name: of the piece: the record of another one, copied here, is none.
        kind: of the work.
        seconds: that it took.
        files: sizes and hashes of its files.
        answer: what it found, as JSON.
        sha256: of the other fields.

    Raises:
        ValueError: a file is outside of the piece, or the hash is that of other fields.
    """

    name: str
    kind: str
    seconds: float
    files: dict[str, FileRecord]
    answer: msgspec.Raw
    sha256: str

    def __post_init__(self) -> None:
        for name in self.files:
            if not is_plain_path(name):
                raise ValueError(f"files: got {name!r}; expected plain paths inside the piece")
        if self.sha256 != (seal := self._seal(self.name, self.kind, self.seconds, self.files, self.answer)):
            raise ValueError(f"sha256: got {self.sha256!r}; expected {seal}, for the other fields")

    @classmethod
    def of(cls, folder: Path, name: str, kind: str, seconds: float, answer: object) -> PieceRecord:
        """The record of the files in a folder, and of an answer."""
        files, raw = record_files(folder), msgspec.Raw(msgspec.json.encode(answer))
        seal = cls._seal(name, kind, seconds, files, raw)
        return cls(name=name, kind=kind, seconds=seconds, files=files, answer=raw, sha256=seal)

    @staticmethod
    def _seal(name: str, kind: str, seconds: float, files: Mapping[str, FileRecord], answer: msgspec.Raw) -> str:
        return hashlib.sha256(msgspec.json.encode((name, kind, seconds, files, answer))).hexdigest()


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

    def find(self, name: str) -> PieceRecord | None:
        """The record of a finished piece; None if the place has none, a damaged one, or that of another piece.

        Of a URL only the record is read: `path` checks the files.
        """
        return self._record(name) if self.is_remote else _intact(self.folder / name, name)

    def seconds(self, name: str) -> float:
        """The time that a finished piece took; 0 if it is not there."""
        record = self._record(name)
        return 0.0 if record is None else record.seconds

    def answer(self, name: str, kind: type[T]) -> T:
        """What a finished piece found.

        Raises:
            UsageError: it is not there, or found something else.
        """
        record = self._record(name)
        if record is None:
            raise self._missing(name)
        return decode_json(
            bytes(record.answer),
            kind,
            field=f"piece {name}",
            expected=f"what a {record.kind} piece finds",
            fix=f"Remove the piece from {self.place}, and run the same command again.",
            error=UsageError,
        )

    def path(self, name: str) -> Path:
        """The folder of a finished piece on this machine, fetched if it is elsewhere.

        Raises:
            UsageError: it is not there, or damaged.
            ServiceError: it is damaged at the URL; it is removed there.
        """
        folder = self.folder / name
        if _intact(folder, name) is not None:
            return folder
        record = self.find(name) if self.is_remote else None
        if record is None:
            raise self._missing(name)
        system, root = self._system(f"/{name}")
        with self._partial(record.kind) as partial:
            for file in [*record.files, RECORD]:
                (partial / file).parent.mkdir(parents=True, exist_ok=True)
                system.get_file(f"{root}/{file}", str(partial / file))
            if _intact(partial, name) is None:
                with suppress(Exception):  # each file system has errors of its own
                    system.rm_file(f"{root}/{RECORD}")
                got = f"damaged files in {self.place}"
                raise ServiceError(f"piece {name}", got=got, expected="those of its record", fix=_AGAIN)
            _put(partial, folder, name)
        return folder

    @contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        """The folder of a finished piece while it is read; see `path`.

        Raises:
            MissingPieceError: it is not there, or another process has removed it meanwhile, whatever that failed with.
        """
        folder = self.path(name)
        try:
            yield folder
        except (EdgeKVError, OSError):
            if folder.exists():
                raise
            raise self._missing(name) from None

    def files(self, name: str) -> dict[str, Path]:
        """The files of a finished piece on this machine, by their path inside the piece; see `path`."""
        folder = self.path(name)
        if (record := _read(folder, name)) is None:
            raise self._missing(name)
        return {file: folder / file for file in record.files}

    def make(self, name: str, kind: str, work: Callable[[Path], object], *, anew: bool = False) -> PieceRecord:
        """Do a piece of work, unless it is finished.

        Args:
            name: of the piece.
            kind: of the work.
            work: writes files into a folder and returns what it found, for JSON.
            anew: do it also if it is finished, and replace it.

        Raises:
            BundleError: the disk of the store is full; nothing is left of the piece.
        """
        folder = self.folder / name
        if not anew:
            if (earlier := self.find(name)) is not None and earlier.kind == kind:
                return earlier
            if (kept := _intact(folder, name)) is not None and kept.kind == kind:  # made for another place
                self._publish(name, folder, kept)
                return kept
            anew = kept is not None  # of another kind
        with self._partial(kind) as partial:
            start = perf_counter()
            answer = work(partial)
            record = PieceRecord.of(partial, name, kind, round(perf_counter() - start, 3), answer)
            (partial / RECORD).write_bytes(msgspec.json.encode(record))
            self._publish(name, partial, record)
            if anew:
                remove_directory(folder)
            _put(partial, folder, name)
        _proven[folder] = _stamps(folder, record)
        return record

    def remove(self, names: Iterable[str]) -> None:
        """Remove these pieces from this machine; missing ones are ignored."""
        for name in names:
            remove_directory(self.folder / name)

    def clear(self) -> None:
        """Remove all pieces from this machine."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pieces(self) -> int:
        """Number of pieces on this machine."""
        return sum(1 for path in self.folder.glob("[!.]*") if path.is_dir())

    @property
    def bytes(self) -> int:
        """Total size of all files on this machine."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def check(self) -> None:
        """Check that the place can be written, and remove what killed processes left half-written.

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
                with atomic_file(self.folder / ".reached", flush=False) as partial:
                    partial.touch()
        except Exception as error:  # each file system has errors of its own
            raise UsageError(
                f"store {self.place}",
                got=f"{type(error).__name__}: {error}",
                expected="a folder or an fsspec URL that can be written",
                fix="Check the path, the credentials, and that the URL's package is installed, such as s3fs.",
            ) from None
        remove_abandoned(self.folder)

    def _publish(self, name: str, folder: Path, record: PieceRecord) -> None:
        """Copy a piece to the URL, if the place is one."""
        if self.is_remote:
            system, root = self._system(f"/{name}")
            for file in [*record.files, RECORD]:
                system.makedirs(f"{root}/{file}".rpartition("/")[0], exist_ok=True)
                system.put_file(str(folder / file), f"{root}/{file}")

    def _record(self, name: str) -> PieceRecord | None:
        if not self.is_remote:
            return _read(self.folder / name, name)
        system, root = self._system(f"/{name}")
        try:
            raw = system.cat_file(f"{root}/{RECORD}")
            record = decode_json(raw, PieceRecord, field=f"{root}/{RECORD}", expected=_WHOLE, fix=_AGAIN)
        except (OSError, EdgeKVError):
            return None
        return record if record.name == name else None

    def _missing(self, name: str) -> MissingPieceError:
        return MissingPieceError(
            f"piece {name}",
            got=f"nothing whole in {self.place}",
            expected="a finished piece",
            fix="Run the same command again; give workers a folder or URL that all of them reach.",
        )

    def _system(self, inner: str) -> tuple[Any, str]:
        import fsspec

        system, root = fsspec.core.url_to_fs(self.place + inner)
        system.invalidate_cache()
        return system, root

    @contextmanager
    def _partial(self, kind: str) -> Iterator[Path]:
        """A new folder, removed if it is still there at the end.

        Raises:
            BundleError: the disk is full.
        """
        with full_disk_named(self.folder, f"the piece {kind}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            with held_folder(self.folder, _PARTIAL) as held:
                (held / NEW).mkdir()
                yield held / NEW


def store_in(cache_dir: Path | None = None) -> PieceStore:
    """The store in a cache directory; None for EDGEKV_CACHE_DIR or the user's cache directory.

    Raises:
        UsageError: it is no folder, or cannot be made.
    """
    folder = (cache_dir or cache_folder()).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--cache-dir {folder}",
            got=error.strerror,
            expected="a folder that can be written",
            fix=f"Give another one, or set {CACHE_VARIABLE}.",
        ) from None
    return PieceStore(str(folder / "pieces"))


def _read(folder: Path, name: str) -> PieceRecord | None:
    try:
        record = read_json(folder / RECORD, PieceRecord, expected=_WHOLE, fix=_AGAIN)
    except EdgeKVError:
        return None
    return record if record.name == name else None


def _intact(folder: Path, name: str) -> PieceRecord | None:
    """The record of a piece; None if there is none, it is another one's, or a file is missing or damaged.

    Files that this process has hashed are hashed again only if their time of change is another one.
    """
    if (record := _read(folder, name)) is None:
        return None
    try:
        stamps = _stamps(folder, record)
        if stamps == _proven.get(folder):
            return record
        if any(stamp[1] != file.bytes for stamp, file in zip(stamps, record.files.values(), strict=True)):
            return None
        with file_hashes() as hashes:
            if any(hashes.sha256_of(folder / name) != file.sha256 for name, file in record.files.items()):
                return None
    except OSError:
        return None
    _proven[folder] = stamps
    return record


def _stamps(folder: Path, record: PieceRecord) -> list[tuple[str, int, int, int]]:
    """Hash, size and times of each file; writing to a file sets both times."""
    stamps = []
    for name, file in record.files.items():
        status = (folder / name).stat()
        stamps.append((file.sha256, status.st_size, status.st_mtime_ns, status.st_ino))
    return stamps


def _put(partial: Path, folder: Path, name: str) -> None:
    """Rename a complete folder; one that another process has put there meanwhile stays."""
    if folder.exists() and _intact(folder, name) is None:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        partial.rename(folder)
    except OSError:
        if _intact(folder, name) is None:
            raise
