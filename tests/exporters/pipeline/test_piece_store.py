"""Finished pieces: complete or not there, in a folder or at a URL, and nothing forged is taken."""

from __future__ import annotations

import hashlib
import json
import shutil
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import fsspec
import msgspec
import pytest
from moto.server import ThreadedMotoServer

from edgekv.errors import BundleError, ServiceError, UsageError
from exporters.pipeline.dask.limit import within
from exporters.pipeline.pieces import read_compiled, read_manifest
from exporters.pipeline.store import MissingPieceError, PieceStore
from tests.support.processes import WAIT_S, contents, left_by_a_killed_process


def test_a_piece_is_complete_or_not_there(tmp_path):
    store = PieceStore(str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").write_text("a")
        raise ValueError

    with pytest.raises(ValueError):
        store.make("key", "test", fail)
    assert store.find("key") is None and not [*tmp_path.iterdir()]
    store.make("key", "test", lambda folder: (folder / "whole").write_text("ab"))
    assert store.find("key") is not None and (store.path("key") / "whole").read_text() == "ab"
    (tmp_path / "key" / "whole").write_text("a")
    assert store.find("key") is None, "a file of another size"


def test_a_damaged_piece_is_made_again(tmp_path):
    store, made = PieceStore(str(tmp_path)), []

    def make() -> None:
        store.make("key", "test", lambda folder: made.append((folder / "file").write_text("right")))

    make()
    (tmp_path / "key" / "file").write_text("wrong")
    assert store.find("key") is None
    with pytest.raises(UsageError, match="piece key: got nothing whole"):
        store.path("key")
    make()
    record = tmp_path / "key" / "piece.json"
    record.write_bytes(record.read_bytes().replace(b'"seconds":0', b'"seconds":1'))
    assert store.find("key") is None
    make()
    assert len(made) == 3 and (store.path("key") / "file").read_text() == "right"


def test_a_piece_that_goes_while_it_is_read_is_missing(tmp_path, monkeypatch):
    """Another export that shares it has ended and removed it: the error of the file says less."""
    store, path = PieceStore(str(tmp_path)), PieceStore.path
    store.make("key", "test", lambda folder: (folder / "a").write_text("a"))
    with pytest.raises(BundleError, match="got nothing there"):
        read_manifest(store, "key")  # it is there, without a bundle

    def removed(self: PieceStore, name: str) -> Path:
        folder = path(self, name)
        self.remove([name])
        return folder

    monkeypatch.setattr(PieceStore, "path", removed)
    for read in (partial(read_manifest, store), store.files):
        with pytest.raises(MissingPieceError, match="piece key: got nothing whole"):
            read("key")
        store.make("key", "test", lambda folder: (folder / "a").write_text("a"))


def test_a_piece_that_is_damaged_at_its_url_is_made_again(tmp_path):
    url = f"file://{tmp_path}/shared"
    here, there = PieceStore(url, tmp_path / "here"), PieceStore(url, tmp_path / "there")
    here.make("key", "test", lambda folder: (folder / "file").write_text("right"))
    (tmp_path / "shared" / "key" / "file").write_text("wrong")
    with pytest.raises(ServiceError, match=r"piece key: got damaged files .* Run the same command again"):
        there.path("key")
    there.make("key", "test", lambda folder: (folder / "file").write_text("right"))
    assert (PieceStore(url, tmp_path / "third").path("key") / "file").read_text() == "right"


def test_half_written_pieces_of_killed_processes_alone_are_removed(tmp_path):
    store, left = PieceStore(str(tmp_path)), left_by_a_killed_process(tmp_path, ".partial")

    def work(folder: Path) -> None:
        (folder / "half").touch()
        PieceStore(str(tmp_path)).check()
        assert (folder / "half").exists() and not left.exists()

    store.make("key", "test", work)
    assert {path.name for path in tmp_path.iterdir()} == {"key", ".reached"}


@pytest.mark.parametrize("place", ["folder", "url"])
def test_the_record_of_another_piece_is_none(tmp_path, place):
    """A folder that was copied or renamed: its hashes are right, and it is other work."""
    shared = tmp_path / "shared"
    store = PieceStore(str(shared) if place == "folder" else f"file://{shared}", tmp_path / "cache")
    store.make("one", "test", lambda folder: (folder / "file").write_text("one"))
    shutil.copytree(shared / "one", shared / "other")
    assert store.find("other") is None and store.seconds("other") == 0
    for read in (store.path, store.files, partial(store.answer, kind=int)):
        with pytest.raises(MissingPieceError, match="piece other: got nothing whole"):
            read("other")
    store.make("other", "test", lambda folder: (folder / "file").write_text("other"))
    assert (store.path("other") / "file").read_text() == "other"


def test_a_piece_of_another_kind_is_made_again(tmp_path):
    store = PieceStore(str(tmp_path))
    store.make("key", "survey", lambda folder: (folder / "file").write_text("survey"))
    store.make("key", "layer", lambda folder: (folder / "file").write_text("layer"))
    assert (store.path("key") / "file").read_text() == "layer" and store.find("key").kind == "layer"


@pytest.mark.parametrize("name", ["../../out", "/out", "inner/../../../out", "C:/out"])
def test_a_forged_record_writes_nothing_outside_of_its_piece(name, tmp_path):
    shared = tmp_path / "shared"
    (shared / "key").mkdir(parents=True)
    place = shared / "key" / name.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("x")
    found = {name: {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}}
    fields = {"name": "key", "kind": "test", "seconds": 0.0, "files": found, "answer": None}
    seal = hashlib.sha256(msgspec.json.encode([*fields.values()])).hexdigest()
    (shared / "key" / "piece.json").write_text(json.dumps(fields | {"sha256": seal}))
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="piece key: got nothing whole"):
        PieceStore(f"file://{shared}", tmp_path / "a" / "cache").path("key")
    assert contents(tmp_path) == before


def test_a_forged_answer_is_refused_in_words(tmp_path):
    store = PieceStore(str(tmp_path))
    store.make("check", "check", lambda folder: {"not": "a list"})
    with pytest.raises(UsageError, match=r"piece check: got Expected `array`.*what a check piece finds. Remove"):
        store.answer("check", list[str])
    answer = {"file": "../x.bin", "wrappers": {}, "graphs": 1, "optimization": 3, "floating": {}, "peak_bytes": 0}
    store.make("compile", "compile", lambda folder: answer)
    with pytest.raises(UsageError, match=r"piece compile: got a binary of \.\./x\.bin; expected its files"):
        read_compiled(store, "compile")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a local object store."""
    server = ThreadedMotoServer(port=0, verbose=False)
    within(WAIT_S, "object store", server.start, fix="Look at its log.")
    host, port = server.get_host_and_port()
    given = {
        "key": "a",
        "secret": "b",
        "endpoint_url": f"http://{host}:{port}",
        "client_kwargs": {"region_name": "us-east-1"},
        "config_kwargs": {"connect_timeout": 10, "read_timeout": WAIT_S, "retries": {"max_attempts": 1}},
    }
    monkeypatch.setitem(fsspec.config.conf, "s3", given)
    request = urllib.request.Request(f"{given['endpoint_url']}/bucket", method="PUT")
    request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request")
    with urllib.request.urlopen(request, timeout=WAIT_S):
        pass
    yield "s3://bucket/sweeps"
    within(WAIT_S, "object store", server.stop, fix="Look at its log.")


@pytest.mark.parametrize("kind", ["file", "memory", "s3"])
def test_pieces_travel_by_url(kind, tmp_path, request):
    url = {"file": f"file://{tmp_path}/shared", "memory": "memory://pieces"}.get(kind) or request.getfixturevalue(
        "bucket"
    )
    here, there = PieceStore(url, tmp_path / "here"), PieceStore(url, tmp_path / "there")
    here.check()

    def work(folder: Path) -> list[int]:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("text")
        return [1, 2]

    here.make("key", "test", work)
    assert (there.path("key") / "inner" / "file").read_text() == "text"
    assert there.find("key") == here.find("key") and there.find("other") is None
    here.make("key", "test", lambda folder: pytest.fail("it is finished"))
    PieceStore(url + "2", tmp_path / "here").make("key", "test", lambda folder: pytest.fail("it is on this machine"))
    assert PieceStore(url + "2", tmp_path / "third").find("key") is not None


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for place in (f"{tmp_path}/file/store", "nosuch://bucket"):
        with pytest.raises(UsageError, match="expected a folder or an fsspec URL that can be written"):
            PieceStore(place).check()
