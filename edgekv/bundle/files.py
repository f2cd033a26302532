"""Sizes and hashes of the files of a folder."""

from __future__ import annotations

from pathlib import Path

from edgekv.bundle.manifest import MANIFEST
from edgekv.bundle.records import FileRecord
from edgekv.system import sha256_of


def record_files(folder: Path) -> dict[str, FileRecord]:
    """The record of every file in a folder and its subfolders, except the manifest, by relative path, sorted."""
    records = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST:
            records[name] = FileRecord(bytes=path.stat().st_size, sha256=sha256_of(path))
    return records
