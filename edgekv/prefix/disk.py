"""The folder of block files."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edgekv.prefix.blockfile import SUFFIX, BlockRecord, RejectedFileError, encode, read_record, read_rows
from edgekv.prefix.errors import PrefixError
from edgekv.prefix.keys import SECRET_BYTES, Keys
from edgekv.prefix.stats import Counters
from edgekv.system import is_alive

SECRET = "store.key"
_NAME = re.compile(r"[0-9a-f]{32}-g\d+\.safetensors")
_PARTIAL = re.compile(r"\..+\.partial-(\d+)")


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A block file that was there when the store was opened, and its size in bytes."""

    record: BlockRecord
    file_bytes: int


class DiskFolder:
    """Block files that appear whole or not at all and are proved before they are used.

    A file of another fingerprint, or one that does not bear a block file's name, is counted as rejected and left
    alone. A file with a block file's name that is not what its name says is counted and removed.

    Attributes:
        keys: made from the folder's own secret.
    """

    def __init__(self, folder: Path, counters: Counters) -> None:
        self._folder = folder
        self._counters = counters
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.keys = Keys(_secret(folder))
        except OSError as error:
            fix = "Give a folder that you can write."
            raise PrefixError(
                f"disk_folder {folder}", got=error.strerror, expected="a writable folder", fix=fix
            ) from None

    def scan(self, fingerprint: bytes) -> list[FoundFile]:
        """The block files of a fingerprint, the longest unused first; remnants of killed processes are removed."""
        found: list[tuple[int, FoundFile]] = []
        for path in sorted(self._folder.iterdir()):
            if (partial := _PARTIAL.fullmatch(path.name)) is not None:
                if not is_alive(int(partial[1])):
                    path.unlink(missing_ok=True)
            elif path.suffix == SUFFIX:
                try:
                    status = path.stat()
                    record = self._identify(path, fingerprint)
                except (OSError, RejectedFileError):
                    self._counters.rejected_files += 1
                else:
                    found.append((status.st_mtime_ns, FoundFile(record, status.st_size)))
        return [file for _, file in sorted(found, key=lambda entry: entry[0])]

    def encode(self, record: BlockRecord, rows: NDArray[Any]) -> bytes:
        """The file of a block."""
        return encode(record, rows, self.keys)

    def write(self, record: BlockRecord, data: bytes) -> bool:
        """Put a file in place; False if the disk does not take it.

        It is not forced to the disk: what a power cut leaves of it has no right checksum.
        """
        path = self._path(record)
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
        try:
            partial.write_bytes(data)
            partial.replace(path)
        except OSError:
            self._counters.failed_writes += 1
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            return False
        return True

    def read(self, record: BlockRecord) -> NDArray[Any] | None:
        """The rows of a block, proved; None if the file is gone, or was rejected and is removed."""
        path = self._path(record)
        try:
            said, rows = read_rows(path, self.keys)
            if said.name(self.keys) != path.name or said.fingerprint != record.fingerprint:
                raise RejectedFileError("it is another block")
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, RejectedFileError):
            self._counters.rejected_files += 1
            self._unlink(path)
            return None
        return rows

    def remove(self, record: BlockRecord) -> None:
        """Remove a block's file."""
        self._unlink(self._path(record))

    def reject(self, record: BlockRecord) -> None:
        """Count a file that is of no use and remove it."""
        self._counters.rejected_files += 1
        self.remove(record)

    def _identify(self, path: Path, fingerprint: bytes) -> BlockRecord:
        named = _NAME.fullmatch(path.name) is not None
        try:
            record = read_record(path)
        except RejectedFileError:
            if named:
                self._unlink(path)
            raise
        if record.fingerprint != fingerprint or not named:
            raise RejectedFileError("it is foreign")
        if record.name(self.keys) != path.name:
            self._unlink(path)
            raise RejectedFileError("it is not what its name says")
        return record

    def _path(self, record: BlockRecord) -> Path:
        return self._folder / record.name(self.keys)

    def _unlink(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _secret(folder: Path) -> bytes:
    """The folder's secret, made by the first store that opens it."""
    path = folder / SECRET
    if not path.exists():
        fresh = path.with_name(f".{SECRET}.partial-{os.getpid()}")
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, os.urandom(SECRET_BYTES))
        finally:
            os.close(descriptor)
        with suppress(FileExistsError):
            os.link(fresh, path)
        fresh.unlink()
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        fix = "Remove the folder; its blocks cannot be proved any more."
        raise PrefixError(str(path), got=f"{len(secret)} bytes", expected=f"{SECRET_BYTES} bytes", fix=fix)
    return secret
