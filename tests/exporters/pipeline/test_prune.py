"""Removing pieces that nobody has used for a while."""

from __future__ import annotations

import os

import pytest

from edgekv.errors import UsageError
from edgekv.machine.scratch import held_folder
from exporters.pipeline.prune import PruneResult, check_prunable, mark_used, prune
from exporters.pipeline.store import PieceStore
from tests.support.processes import left_by_a_killed_process


def test_pieces_that_nobody_uses_are_removed(tmp_path):
    store = PieceStore(str(tmp_path))
    for key in ("old", "used", "new"):
        store.make(key, "test", lambda folder: (folder / "file").write_bytes(b"1234"))
    left = left_by_a_killed_process(tmp_path, ".partial")
    (tmp_path / "notes.txt").touch()
    for path in (tmp_path / "old" / "piece.json", tmp_path / "used" / "piece.json", *left.iterdir(), left):
        os.utime(path, (0, 0))
    mark_used(store, {"used", "missing"})
    size_bytes = 4 + (tmp_path / "old" / "piece.json").stat().st_size
    with held_folder(tmp_path, ".partial") as held:
        os.utime(held / ".lock", (0, 0))
        os.utime(held, (0, 0))
        assert prune(store, 30) == PruneResult(2, size_bytes)
        assert held.is_dir(), "what a living process writes is left alone, however old"
    assert {path.name for path in tmp_path.iterdir()} == {"used", "new", "notes.txt"}
    with pytest.raises(UsageError, match="--prune: got it for memory://pieces"):
        check_prunable(PieceStore("memory://pieces"))
