"""Removing pieces that nobody has used for a while."""

from __future__ import annotations

import os

import pytest

from edgekv.errors import UsageError
from exporters.pipeline.prune import Pruned, check_prunable, mark_used, prune
from exporters.pipeline.store import PieceStore


def test_pieces_that_nobody_uses_are_removed(tmp_path):
    store = PieceStore(str(tmp_path))
    for key in ("old", "used", "new"):
        store.make(key, "test", lambda folder: (folder / "file").write_bytes(b"1234"))
    (tmp_path / ".partial-1-2").mkdir()
    (tmp_path / "notes.txt").touch()
    for path in (tmp_path / "old" / "piece.json", tmp_path / "used" / "piece.json", tmp_path / ".partial-1-2"):
        os.utime(path, (0, 0))
    mark_used(store, {"used", "missing"})
    size_bytes = 4 + (tmp_path / "old" / "piece.json").stat().st_size
    assert prune(store, 30) == Pruned(2, size_bytes)
    assert {path.name for path in tmp_path.iterdir()} == {"used", "new", "notes.txt"}
    with pytest.raises(UsageError, match="--prune: got it for memory://pieces"):
        check_prunable(PieceStore("memory://pieces"))
