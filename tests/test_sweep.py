"""Sweeps: the bytes of separate exports, each shared piece once, and refusals before any work."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import msgspec
import numpy as np
import pytest
from exporters.sweep.carry import Where, fitness_for
from exporters.sweep.fitness import versions
from exporters.sweep.limit import within
from exporters.sweep.source import Pinned, open_checkpoint
from exporters.sweep.store import PieceStore
from exporters.sweep.work import read_compiled
from moto.server import ThreadedMotoServer
from safetensors.numpy import load_file, save_file

from devices import find
from edgekv.cli import run
from edgekv.errors import CheckpointError, ServiceError, UsageError
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import RunOptions, export_bundle
from exporters.quantize.recipe import find_recipe
from exporters.sweep.combination import Combination, Common, combinations
from exporters.sweep.result import Result, SweepReport, recommend, with_front
from exporters.sweep.sweep import RESULTS, run_sweep, store_sample
from tests.checkpoints import NEWER, write_checkpoint
from tests.machines import WAIT_S
from tests.test_page import Page

TEXT = "def area(width, height):\n    return width * height\n" * 20
COMMON = Common(ar=(1, 16), calibration_tokens=512, check_on_htp=False, compile=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sweep") / "checkpoint", NEWER)


def wanted(*, kv: tuple[str, ...] = ("u8",), devices: tuple[str, ...] = ("SM8650", "SM8750")) -> list[Combination]:
    recipes = [(name, find_recipe(name)) for name in ("w8a16", "w4a16")]
    return [*combinations(recipes, kv, [find(name) for name in devices], [(64,)])]  # type: ignore[arg-type]


def swept(
    folder: Path, checkpoint: Path, given: list[Combination], said: list[str] | None = None, **changes
) -> SweepReport:
    folder.mkdir(exist_ok=True)
    where = Where(folder, **{"workers": 2, "say": ([] if said is None else said).append, **changes})
    return run_sweep(str(checkpoint), given, "text.txt", TEXT, 200, where, COMMON)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def done(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SweepReport]:
    """Two recipes, two cache types, two chips, on two local workers."""
    folder = tmp_path_factory.mktemp("done")
    return folder, swept(folder, checkpoint, wanted(kv=("u8", "s16")))


@pytest.mark.slow
def test_bundles_are_those_of_separate_exports(checkpoint, done, tmp_path):
    folder, report = done
    given = wanted(kv=("u8", "s16"))
    assert [each.name for each in report.results] == [each.name for each in given]
    opened = Checkpoint.open(str(checkpoint))
    for each in (given[0], given[3], given[5]):
        export_bundle(opened, tmp_path / each.name, each.options(COMMON), RunOptions(cache_dir=tmp_path / "cache"))
        assert files(folder / "bundles" / each.name) == files(tmp_path / each.name)


@pytest.mark.slow
def test_chips_share_all_pieces_but_the_compiled(done):
    _, report = done
    # a survey, 2 recipes x 2 caches x (layers, head, bundle, evaluation, layer errors), a reference
    layers = len([loss for loss in report.results[0].layers if loss.place.isdecimal()])
    assert report.pieces == 1 + 4 * (layers + 1 + 3) + 1 == report.done
    assert report.separate_pieces == 8 * (1 + layers + 1 + 3 + 1)


@pytest.mark.slow
def test_a_finished_sweep_does_nothing_again(checkpoint, done):
    folder, report = done
    again = swept(folder, checkpoint, wanted(kv=("u8", "s16")), scheduler="tcp://127.0.0.1:9")
    assert again.done == 0 and again.results == report.results
    assert msgspec.json.decode((folder / RESULTS).read_bytes(), type=SweepReport) == again


def test_what_cannot_be_is_listed_before_work(checkpoint, tmp_path):
    given, said = wanted(kv=("u8", "s16"), devices=("SM8450", "SM8650")), []
    with pytest.raises(UsageError, match="2 of 8 that cannot be: w8a16-s16-SM8450-64, w4a16-s16-SM8450-64"):
        swept(tmp_path, checkpoint, given, said)
    assert [line.partition(": ")[0] for line in said] == ["refused", "refused"] and "V73" in said[0]
    assert not [*tmp_path.iterdir()]


def test_a_scheduler_that_does_not_answer(checkpoint, tmp_path):
    with pytest.raises(ServiceError, match=r"scheduler tcp://127.0.0.1:9: got .*expected a Dask scheduler"):
        swept(tmp_path, checkpoint, wanted()[:1], scheduler="tcp://127.0.0.1:9", workers=None)


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


def test_a_piece_that_is_damaged_at_its_url_is_made_again(tmp_path):
    url = f"file://{tmp_path}/shared"
    here, there = PieceStore(url, tmp_path / "here"), PieceStore(url, tmp_path / "there")
    here.make("key", "test", lambda folder: (folder / "file").write_text("right"))
    (tmp_path / "shared" / "key" / "file").write_text("wrong")
    with pytest.raises(ServiceError, match=r"piece key: got damaged files .* Run the same command again"):
        there.path("key")
    there.make("key", "test", lambda folder: (folder / "file").write_text("right"))
    assert (PieceStore(url, tmp_path / "third").path("key") / "file").read_text() == "right"


@pytest.mark.parametrize("name", ["../../out", "/out", "inner/../../../out", "C:/out"])
def test_a_forged_record_writes_nothing_outside_of_its_piece(name, tmp_path):
    shared = tmp_path / "shared"
    (shared / "key").mkdir(parents=True)
    place = shared / "key" / name.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("x")
    found = {name: {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}}
    fields = {"kind": "test", "seconds": 0.0, "files": found, "answer": None}
    seal = hashlib.sha256(msgspec.json.encode([*fields.values()])).hexdigest()
    (shared / "key" / "piece.json").write_text(json.dumps(fields | {"sha256": seal}))
    before = files(tmp_path)
    with pytest.raises(UsageError, match="piece key: got nothing whole"):
        PieceStore(f"file://{shared}", tmp_path / "a" / "cache").path("key")
    assert files(tmp_path) == before


def test_a_forged_answer_is_refused_in_words(tmp_path):
    store = PieceStore(str(tmp_path))
    store.make("check", "check", lambda folder: {"not": "a list"})
    with pytest.raises(UsageError, match=r"piece check: got Expected `array`.*what a check piece finds. Remove"):
        store.answer("check", list[str])
    answer = {"file": "../x.bin", "wrappers": {}, "graphs": 1, "floating": {}, "peak_bytes": 0}
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


@pytest.mark.slow
@pytest.mark.htp
def test_one_export_and_one_compilation_on_a_cluster(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / "cache"))
    options = ["--device", "SM8650", "--context", "64", "--ar", "1,16", "--calibration-tokens", "512"]
    far = ["--compile", "--scheduler", "local", "--divide-layers"]
    for place, more in (("near", ["--compile"]), ("far", far)):
        assert run(["export", str(checkpoint), "-o", str(tmp_path / place), *options, *more]) == 0
    assert files(tmp_path / "far") == files(tmp_path / "near")
    assert run(["export", str(checkpoint), "-o", str(tmp_path / "other"), *options, "--divide-layers"]) == 2
    assert "--divide-layers: got it without --scheduler" in capsys.readouterr().err
    for place, more in (("near", []), ("far", ["--scheduler", "local"])):
        assert run(["compile", str(tmp_path / place), "--device", "SM8750", *more]) == 0
    assert files(tmp_path / "far") == files(tmp_path / "near")
    assert run(["compile", str(tmp_path / "far"), "--device", "SM8550", "--scheduler", "tcp://127.0.0.1:9"]) == 1
    assert "expected a Dask scheduler that answers" in capsys.readouterr().err
    assert not (tmp_path / "far" / "compiled" / "SM8550").exists()


@pytest.mark.slow
def test_the_command_shows_the_answer(checkpoint, done, tmp_path, capsys):
    folder, report = done
    (tmp_path / "text.txt").write_text(TEXT)
    given = ["--recipes", "w8a16,w4a16", "--kv", "u8,s16", "--devices", "SM8650,SM8750", "--contexts", "64"]
    given += ["--ar", "1,16", "--calibration-tokens", "512", "--skip-htp-check", "--scheduler", "tcp://127.0.0.1:9"]
    given += ["--text", str(tmp_path / "text.txt"), "--tokens", "200", "-o", str(folder), "--budget", "9MB"]
    assert run(["sweep", str(checkpoint), *given, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in shown["results"]] == [each.name for each in report.results]
    assert run(["sweep", str(checkpoint), *given]) == 0
    lines = capsys.readouterr().out.splitlines()
    best = min(report.results[::2], key=lambda each: (each.evaluation.kl_nats, each.bytes))
    assert next(line for line in lines if line.startswith("  edgekv export")).strip() == best.command
    page = Page((folder / "sweep.html").read_text())
    assert not page.open and not page.links and all(each.name in page.text for each in report.results)
    assert page.text.count("\N{BLACK STAR}") == sum(each.on_front for each in report.results)


@pytest.mark.slow
def test_the_front_and_the_choice(done):
    _, report = done
    first = report.results[0]

    def other(name: str, kl: float, size: int) -> Result:
        quality = msgspec.structs.replace(first.evaluation, kl_nats=kl)
        return msgspec.structs.replace(first, name=name, evaluation=quality, bytes=size)

    results = with_front([other("small", 0.2, 10), other("worse", 0.3, 12), other("good", 0.1, 20)])
    assert [each.name for each in results if each.on_front] == ["small", "good"]
    assert [recommend(results, budget)[0].name for budget in (None, 15, 5)] == ["good", "small", None]
    assert recommend(results, None)[0].knee is None, "two points are a line"
    bent = [other("small", 0.2, 10), other("bend", 0.03, 12), other("good", 0.02, 20), other("worse", 0.1, 15)]
    assert recommend(bent, None)[0].knee == "bend"
    straight = [other("small", 0.2, 10), other("on", 0.062, 15), other("good", 0.02, 20)]
    assert recommend(straight, None)[0].knee is None, "0.01 of an axis below the line"
    hollow = [other("small", 0.2, 10), other("above", 0.19, 19), other("good", 0.02, 20)]
    assert recommend(hollow, None)[0].knee is None, "it is above the line"


def test_a_checkpoint_at_a_url(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path))
    opened = open_checkpoint(f"file://{checkpoint}")
    assert opened.weights_sha256() == Checkpoint.open(str(checkpoint)).weights_sha256()
    assert opened.folder.is_relative_to(tmp_path) and opened.name == f"file://{checkpoint}"
    for url in (f"file://{tmp_path}/nothing", "nosuch://bucket"):
        with pytest.raises(CheckpointError, match="expected a folder or a GGUF file"):
            open_checkpoint(url)


def test_why_a_worker_does_not_fit(checkpoint, tmp_path):
    store = PieceStore(str(tmp_path))
    store.make("probe", "test", lambda folder: None)
    (tmp_path / "text.txt").write_text("a text")
    fit = fitness_for(Pinned.of(str(checkpoint)), tmp_path / "text.txt", store, "probe", 1)
    assert fit.obstacles() == []
    other = write_checkpoint(tmp_path / "other", NEWER, seed=1)
    assert open_checkpoint(str(other)).config_sha256 == open_checkpoint(str(checkpoint)).config_sha256
    reasons = {
        "numpy .*; expected 0.1": replace(fit, versions=versions() | {"numpy": "0.1"}),
        "no folder": replace(fit, checkpoint=replace(fit.checkpoint, name="/none")),
        "another one, whose weights differ": replace(fit, checkpoint=replace(fit.checkpoint, name=str(other))),
        "another calibration text: that of": replace(fit, calibration=None),
        "none.txt": replace(fit, calibration=tmp_path / "none.txt"),
        "pieces not seen": replace(fit, probe="other"),
        "GB free in .*; expected 1000000000.00 GB": replace(fit, disk_bytes=10**18),
    }
    for reason, unfit in reasons.items():
        (found,) = unfit.obstacles()
        assert re.search(reason, found), found


def test_errors_travel_whole():
    error = UsageError("--kv", got="u9", expected=["u8"], fix="Use u8.")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is UsageError and str(copy) == str(error) and copy.field == "--kv"


@pytest.mark.slow
def test_a_piece_that_fails_stops_the_sweep_with_its_error(checkpoint, tmp_path):
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][:] = np.nan
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        swept(tmp_path / "one", broken, wanted()[:1])
    report = swept(tmp_path / "all", broken, wanted()[:1], keep_going=True)
    assert not report.results and [each.name for each in report.failed] == ["w8a16-u8-SM8650-64"]
    assert "survey: " in report.failed[0].reason


def test_line_ends_of_the_text_stay(tmp_path):
    store, text = PieceStore(str(tmp_path)), "one\r\ntwo\n"
    assert store_sample(store, "text.txt", text, 10).read(store) == text
