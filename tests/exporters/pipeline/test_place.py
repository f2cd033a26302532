"""Checkpoints that are fetched from a URL."""

from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from edgekv.errors import CheckpointError
from exporters.pipeline.place import open_checkpoint
from tests.support.processes import left_by_a_killed_process


class Hostile(MemoryFileSystem):
    """Lists a file outside of the folder."""

    protocol = "hostile"

    def find(self, path, maxdepth=None, withdirs=False, detail=False, **kwargs):
        return {f"{path}/../../../escaped": {"size": 1, "type": "file"}}

    def get_file(self, rpath, lpath, **kwargs):
        Path(lpath).write_bytes(b"x")


class Failing(MemoryFileSystem):
    """Breaks off at the second file."""

    protocol = "failing"
    sent = 0

    def get_file(self, rpath, lpath, **kwargs):
        if Failing.sent:
            raise ConnectionError("the line is cut")
        Failing.sent = 1
        super().get_file(rpath, lpath, **kwargs)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "checkpoints"


def test_a_listing_cannot_write_outside_of_its_folder(own_cache, tmp_path):
    fsspec.register_implementation("hostile", Hostile, clobber=True)
    with pytest.raises(CheckpointError, match=r"lists '.*escaped', which leads out of the folder"):
        open_checkpoint("hostile://somewhere/model")
    assert not [*tmp_path.rglob("escaped")]


def test_a_fetch_that_fails_leaves_nothing(own_cache):
    fsspec.register_implementation("failing", Failing, clobber=True)
    system = fsspec.filesystem("failing")
    for name in ("config.json", "model.safetensors"):
        system.pipe_file(f"failing://cut/{name}", b"{}")
    with pytest.raises(CheckpointError, match="the line is cut"):
        open_checkpoint("failing://cut")
    assert [*own_cache.iterdir()] == []


def test_a_killed_fetch_is_cleared_away_by_the_next(own_cache):
    system = fsspec.filesystem("memory")
    system.pipe_file("/left/config.json", b"{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: got no such file"):
        open_checkpoint("memory://left")  # fetched, but no checkpoint
    (fetched,) = own_cache.iterdir()
    fetched.rename(left_by_a_killed_process(own_cache, f".{fetched.name}.partial") / "new")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: got no such file"):
        open_checkpoint("memory://left")
    assert [*own_cache.iterdir()] == [fetched]
