"""Finished pieces of sweeps by key, in a folder that all machines share or at an fsspec URL."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from edgekv.bundle import atomic_file
from edgekv.errors import UsageError
from edgekv.system import cache_folder

RECORD = "piece.json"


class PieceRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished piece.

    Attributes:
        kind: of the work.
        seconds: that it took.
        files: sizes in bytes of its files.
        answer: what it found, as JSON.
    """

    kind: str
    seconds: float
    files: dict[str, int]
    answer: msgspec.Raw


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
        """The record of a finished piece whose files are complete; None if the place has none."""
        if not self.is_remote:
            return _complete(self.folder / key)
        system, root = self._system(f"/{key}")
        try:
            return msgspec.json.decode(system.cat_file(f"{root}/{RECORD}"), type=PieceRecord)
        except (OSError, msgspec.DecodeError):
            return None

    def path(self, key: str) -> Path:
        """The folder of a finished piece on this machine, fetched if it is elsewhere.

        Raises:
            UsageError: it is not there.
        """
        folder = self.folder / key
        if _complete(folder) is not None:
            return folder
        record = self.find(key)
        if record is None:
            raise UsageError(
                f"piece {key}",
                got=f"nothing in {self.place}",
                expected="a finished piece",
                fix="Run the same command again; give workers a folder or URL that all of them reach.",
            )
        system, root = self._system(f"/{key}")
        partial = self._partial()
        try:
            for name in [*record.files, RECORD]:
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                system.get_file(f"{root}/{name}", str(partial / name))
            _put(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return folder

    def make(self, key: str, kind: str, work: Callable[[Path], object]) -> PieceRecord:
        """Do a piece of work, unless it is finished.

        Args:
            key: of the piece.
            kind: of the work.
            work: writes files into a folder and returns what it found, for JSON.
        """
        if (found := self.find(key)) is not None:
            return found
        if (kept := _complete(self.folder / key)) is not None:  # made for another place
            self._publish(key, self.folder / key, kept)
            return kept
        partial, start = self._partial(), perf_counter()
        try:
            answer = msgspec.json.encode(work(partial))
            files = {
                path.relative_to(partial).as_posix(): path.stat().st_size
                for path in sorted(partial.rglob("*"))
                if path.is_file()
            }
            record = PieceRecord(
                kind=kind, seconds=round(perf_counter() - start, 3), files=files, answer=msgspec.Raw(answer)
            )
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


def _complete(folder: Path) -> PieceRecord | None:
    try:
        record = msgspec.json.decode((folder / RECORD).read_bytes(), type=PieceRecord)
        if all((folder / name).stat().st_size == size for name, size in record.files.items()):
            return record
    except (OSError, msgspec.DecodeError):
        pass
    return None


def _put(partial: Path, folder: Path) -> None:
    """Rename a complete folder; one that another process has put there meanwhile stays."""
    if folder.exists() and _complete(folder) is None:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        partial.rename(folder)
    except OSError:
        if _complete(folder) is None:
            raise
