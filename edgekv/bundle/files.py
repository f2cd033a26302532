"""Names, sizes and hashes of the files of a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath

from edgekv.bundle.manifest import MANIFEST
from edgekv.bundle.records import FileRecord
from edgekv.machine.system import sha256_of


def record_files(folder: Path, progress: Callable[[int, int], None] = lambda done, of: None) -> dict[str, FileRecord]:
    """The record of every file in a folder and its subfolders, except the manifest, by relative path, sorted.

    Args:
        progress: called with the number of hashed files and the total.
    """
    named = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    named.pop(MANIFEST, None)
    records = {}
    for done, (name, path) in enumerate(named.items()):
        progress(done, len(named))
        records[name] = FileRecord(bytes=path.stat().st_size, sha256=sha256_of(path))
    progress(len(named), len(named))
    return records


def is_plain_path(name: str) -> bool:
    """Whether a name in a record is a path inside the folder of the record, on every system."""
    pure, parts = PurePosixPath(name), PurePosixPath(name).parts
    is_relative = bool(parts) and ".." not in parts and not pure.is_absolute() and not PureWindowsPath(name).drive
    return is_relative and pure.as_posix() == name and "\\" not in name and "\0" not in name
