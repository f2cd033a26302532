"""Sweeps on simulated machines: workers that are killed, join late, do not fit, and a scheduler that vanishes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgekv.errors import ServiceError, UsageError
from exporters.sweep.result import SweepReport
from tests.exporters.sweep.test_sweep import swept, wanted
from tests.support.checkpoints import NEWER, write_checkpoint
from tests.support.processes import WAIT_S, Machines, contents, machines

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("workers") / "checkpoint", NEWER)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("cluster")) as made:
        yield made


def elsewhere(folder: Path, cluster: Machines, checkpoint: Path, **changes) -> SweepReport:
    """A sweep whose pieces travel by URL: no two machines share a folder with them."""
    given = {"scheduler": cluster.address, "workers": None, "store": f"file://{folder}/store", **changes}
    return swept(folder, checkpoint, wanted(), **given)


def odd_version(folder: Path) -> dict[str, str]:
    """Variables of a machine with another onnxruntime-qnn."""
    other = folder / "path" / "onnxruntime_qnn-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime-qnn\nVersion: 9.9.9\n")
    return {"PYTHONPATH": str(other.parent)}


def test_a_worker_is_killed_and_one_joins_late(checkpoint, cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / "command"))
    for name in ("first", "second"):
        cluster.start_worker(name)
    said: list[str] = []

    def progress(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("layer", 2):
            cluster.kill("first")
            cluster.start_worker("third")
            cluster.start_worker("odd", odd_version(tmp_path))
            end = time.monotonic() + WAIT_S
            while not any("onnxruntime-qnn 9.9.9; expected" in line for line in said) and time.monotonic() < end:
                time.sleep(0.05)

    folder = tmp_path / "far"
    report = elsewhere(folder, cluster, checkpoint, progress=progress, said=said)
    local = swept(tmp_path / "near", checkpoint, wanted())
    assert [each.evaluation for each in report.results] == [each.evaluation for each in local.results]
    assert [each.layers for each in report.results] == [each.layers for each in local.results]
    assert contents(folder / "bundles") == contents(tmp_path / "near" / "bundles")
    assert not {path.name for path in (cluster.folder / "second" / "cache" / "pieces").glob(".partial-*")}
    assert any("onnxruntime-qnn 9.9.9; expected" in line for line in said)
    held = contents(cluster.folder / "odd" / "cache")
    assert not [name for name in held if not name.startswith("program/")], "the hash of its program alone"
    for name in ("second", "third", "odd"):
        cluster.kill(name)


def test_a_worker_with_another_version_is_refused_by_name(checkpoint, cluster, tmp_path):
    cluster.start_worker("odd", odd_version(tmp_path))
    with pytest.raises(UsageError, match=r"worker tcp://127.0.0.1:\d+: onnxruntime-qnn 9.9.9; expected "):
        elsewhere(tmp_path / "sweep", cluster, checkpoint)
    cluster.kill("odd")


def test_a_worker_with_too_little_ram(checkpoint, cluster, tmp_path):
    cluster.start_worker("small", ram_bytes=1000)
    with pytest.raises(UsageError, match=r"RAM of workers: got at most 0.00 GB"):
        elsewhere(tmp_path / "sweep", cluster, checkpoint)
    cluster.kill("small")


def test_a_scheduler_that_vanishes(checkpoint, tmp_path):
    (tmp_path / "machines").mkdir()
    with machines(tmp_path / "machines") as cluster:
        cluster.start_worker("only")

        def progress(stage: str, done: int, total: int) -> None:
            if (stage, done) == ("layer", 1):
                cluster.kill("scheduler")

        with pytest.raises(ServiceError, match=r"finished pieces are not done again"):
            elsewhere(tmp_path / "sweep", cluster, checkpoint, progress=progress)
    again = swept(tmp_path / "sweep", checkpoint, wanted(), store=f"file://{tmp_path}/sweep/store")
    assert again.done < again.pieces
