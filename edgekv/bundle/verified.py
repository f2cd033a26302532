"""Hashes of unchanged files, kept in the user's cache folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

import msgspec

from edgekv.errors import EdgeKVError
from edgekv.machine.json_file import read_json
from edgekv.machine.scratch import atomic_file
from edgekv.machine.system import cache_folder, sha256_of

_FILE = "hashes.json"
_MAX_KNOWN = 20_000
_SETTLED_NS = 2_000_000_000  # a file modified this recently may change again without a new time stamp

_rehash: ContextVar[bool] = ContextVar("rehash", default=False)


class _Known(msgspec.Struct, frozen=True, array_like=True):
    """A file as it was when it was hashed. Writing to it sets both times; the change time cannot be set back."""

    bytes: int
    modified_ns: int
    changed_ns: int
    sha256: str


class FileHashes:
    """SHA-256 of files, computed only for files that are new or changed."""

    def __init__(self, known: dict[str, _Known]) -> None:
        self.known = known
        self.computed = 0

    def sha256_of(self, path: Path) -> str:
        """The SHA-256 of a regular file, in hexadecimal.

        Raises:
            OSError: it cannot be read, or is not a regular file.
        """
        before = path.stat()
        key = f"{before.st_dev}:{before.st_ino}"
        known = self.known.get(key)
        stamp = (before.st_size, before.st_mtime_ns, before.st_ctime_ns)
        if known and not _rehash.get() and stamp == (known.bytes, known.modified_ns, known.changed_ns):
            return known.sha256
        digest = sha256_of(path)
        self.computed += 1
        if time.time_ns() - max(before.st_mtime_ns, before.st_ctime_ns) > _SETTLED_NS:
            self.known.pop(key, None)
            self.known[key] = _Known(*stamp, digest)
        return digest


@contextmanager
def file_hashes() -> Iterator[FileHashes]:
    """The known hashes; new ones are saved when the block ends. An unusable cache is ignored."""
    file = cache_folder() / _FILE
    try:
        known = read_json(file, dict[str, _Known], expected="hashes", fix="")
    except EdgeKVError:
        known = {}
    hashes = FileHashes(known)
    try:
        yield hashes
    finally:
        if hashes.computed:
            kept = dict(list(hashes.known.items())[-_MAX_KNOWN:])
            with suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                with atomic_file(file, flush=False) as partial:
                    partial.touch(0o600)
                    partial.write_bytes(msgspec.json.encode(kept))


@contextmanager
def rehashing() -> Iterator[None]:
    """Ignore cached hashes within the block: damage by the disk itself changes no time stamp."""
    token = _rehash.set(True)
    try:
        yield
    finally:
        _rehash.reset(token)


def force_rehash() -> None:
    """As `rehashing`, until the current context ends."""
    _rehash.set(True)
