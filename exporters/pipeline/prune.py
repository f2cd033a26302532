"""Removes pieces that nobody has used for a while."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from edgekv.errors import UsageError
from edgekv.machine.scratch import is_held, is_temporary
from exporters.pipeline.store import RECORD, PieceStore

_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class PruneResult:
    """What was removed.

    Attributes:
        pieces: number of pieces, half-written ones included.
        bytes: size of their files.
    """

    pieces: int = 0
    bytes: int = 0


def check_prunable(store: PieceStore) -> None:
    """Check that a store can be pruned.

    Raises:
        UsageError: it is a URL, whose files have no time of use.
    """
    if store.is_remote:
        raise UsageError(
            "--prune",
            got=f"it for {store.place}",
            expected="pieces in a folder",
            fix="Give the bucket a rule of its own that removes old files.",
        )


def mark_used(store: PieceStore, keys: set[str]) -> None:
    """Keep pieces from being pruned soon; missing ones are ignored."""
    for key in keys:
        try:
            os.utime(store.folder / key / RECORD)
        except OSError:  # not there, or another user's
            continue


def prune(store: PieceStore, days: float) -> PruneResult:
    """Remove pieces last used more than so many days ago, and what was begun then and nobody writes any more."""
    oldest, pieces, size_bytes = time.time() - days * _DAY_S, 0, 0
    for folder in [*store.folder.iterdir()] if store.folder.is_dir() else []:
        used = _used(folder)
        if used is None or used >= oldest:
            continue
        size_bytes += sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        shutil.rmtree(folder, ignore_errors=True)
        pieces += 1
    return PruneResult(pieces, size_bytes)


def _used(folder: Path) -> float | None:
    """When a piece was last used, or a half-written one changed; None for other things, and for what is written now."""
    try:
        if is_temporary(folder):
            return None if is_held(folder) else max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
        return (folder / RECORD).stat().st_mtime
    except OSError:
        return None
