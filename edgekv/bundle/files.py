"""Sizes and hashes of the files of a folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from edgekv.bundle.manifest import MANIFEST, FileRecord

_BLOCK_BYTES = 1 << 20


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Every file under a folder but its manifest, by its path relative to the folder, in the order of names."""
    records = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST:
            records[name] = FileRecord(bytes=path.stat().st_size, sha256=sha256_of(path))
    return records
