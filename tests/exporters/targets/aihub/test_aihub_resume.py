"""What an interrupted or failed `edgekv hub` leaves behind, and how the next run continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgekv.bundle import Bundle, GraphRecord
from edgekv.cli import run
from exporters.pipeline.store import store_in
from exporters.targets.aihub import run as runs, sample
from tests.exporters.targets.aihub.test_aihub import DECODE, POLL, answer
from tests.support.aihub_server import AiHub, Fault
from tests.support.bundles import replace_in_manifest

pytestmark = pytest.mark.htp

SUBMIT = "POST /api/v1/jobs/"


def killed(bundle: Path, ready: Callable[[], bool]) -> None:
    """`edgekv hub compile` in a process of its own, killed without warning once `ready` says so."""
    command = [sys.executable, "-m", "edgekv", "hub", "compile", str(bundle), "--devices", "SM8650", "--poll", "60"]
    process = subprocess.Popen(command, env=os.environ.copy(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not ready() and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and ready()


def test_a_run_killed_while_it_waits_is_picked_up(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = small / "hub" / "jobs"

    def both_are_written_down() -> bool:
        return sum(json.loads(path.read_text())["state"] == "submitted" for path in jobs.glob("*.json")) == 2

    service.patience = 1000
    killed(small, both_are_written_down)
    service.patience = 0
    report = answer(capsys, "compile", str(small), "--devices", "SM8650", *POLL)
    assert [job["state"] for job in report["jobs"]] == ["done", "done"]
    assert (service.count(SUBMIT), service.count("POST /api/v1/models/")) == (2, 2)


def test_a_wait_for_jobs_has_a_limit_and_the_next_command_continues(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service.patience = 100_000
    monkeypatch.setenv("EDGEKV_TIMEOUT_S", "1")
    assert run(["hub", "compile", str(small), "--devices", "SM8650", *POLL]) == 1
    message = capsys.readouterr().err
    assert "AI Hub: got 2 of 2 jobs unfinished after 1 s" in message and "EDGEKV_TIMEOUT_S" in message
    service.patience = 0
    report = answer(capsys, "compile", str(small), "--devices", "SM8650", *POLL)
    assert [job["state"] for job in report["jobs"]] == ["done", "done"] and service.count(SUBMIT) == 2


def test_a_job_whose_answer_never_came_is_found_by_its_name(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.faults.append(Fault("POST", "/api/v1/jobs/", kind="stall"))
    killed(small, lambda: len(service.jobs) == 1)
    service.stalled.set()
    report = answer(capsys, "compile", str(small), "--devices", "SM8650", *POLL)
    assert [job["state"] for job in report["jobs"]] == ["done", "done"]
    assert service.count(SUBMIT) == 2, "one of the killed run, one of this"


def test_jobs_go_on_without_us_and_are_fetched_later(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.patience = 1000
    submitted = answer(capsys, "link", str(small), "--devices", "SM8650", "--no-wait")["jobs"]
    assert {job["state"] for job in answer(capsys, "status", str(small))["jobs"]} == {"submitted"}
    assert answer(capsys, "fetch", str(small))["devices"] == []
    service.patience = 0
    report = answer(capsys, "fetch", str(small))
    assert {job["id"] for job in report["jobs"]} == {job["id"] for job in submitted}
    assert len(report["devices"][0]["artefacts"]) == 3


def test_an_upload_that_failed_is_neither_packed_nor_run_again(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, take = [], sample.take_sample

    def packing(bundle: Bundle, graph: GraphRecord, folder: Path) -> Path:
        made.append(f"pack {graph.name}")
        return pack_graph(bundle, graph, folder)

    def taking(bundle: Bundle, graph: GraphRecord, text: str) -> sample.Sample:
        made.append(f"run {graph.name}")
        return take(bundle, graph, text)

    pack_graph = runs.pack_graph
    monkeypatch.setattr(runs, "pack_graph", packing)
    monkeypatch.setattr(sample, "take_sample", taking)
    infer = ("infer", str(small), "--devices", "SM8650", *POLL)
    for path in ("/api/v1/datasets/", "/api/v1/models/"):
        service.faults.append(Fault("POST", path, status=413, text="Too large."))
        assert run(["hub", *infer]) == 1
    assert store_in().pieces and "Too large" in capsys.readouterr().err
    answer(capsys, *infer)
    assert sorted(made) == ["pack ar1_cl64", "pack ar8_cl64", "run ar1_cl64", "run ar8_cl64"]
    assert not store_in().pieces and len([*(small / "hub" / "samples").iterdir()]) == 2


@pytest.mark.thorough
def test_outputs_are_compared_with_the_step_that_was_submitted(
    service: AiHub, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Although another one was begun since, and its upload failed."""
    service.patience = 1000
    answer(capsys, "infer", str(small), "--devices", "SM8650", "--no-wait")
    other = tmp_path / "other.txt"
    other.write_text("class Area:\n    width = height = 3\n" * 20)
    service.faults.append(Fault("POST", "/api/v1/datasets/", status=413, text="Too large."))
    assert run(["hub", "infer", str(small), "--devices", "SM8650", "--no-wait", "--text", str(other)]) == 1
    capsys.readouterr()
    service.patience = 0
    (device,) = answer(capsys, "fetch", str(small))["devices"]
    assert all(comparison["top1_equal"] for comparison in device["comparisons"])
    answer(capsys, "infer", str(small), "--devices", "SM8650", "--text", str(other), *POLL)
    assert len([*(small / "hub" / "samples").iterdir()]) == 2, "those of the new text"


def test_the_same_command_again_submits_nothing_and_another_device_adds_its_own(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = answer(capsys, "profile", str(small), "--devices", "SM8650", *POLL)
    submitted = service.count(SUBMIT)
    assert answer(capsys, "profile", str(small), "--devices", "SM8650", *POLL) == first
    assert service.count(SUBMIT) == submitted == 5
    answer(capsys, "profile", str(small), "--devices", "SM8650,SM8750", *POLL)
    assert (service.count(SUBMIT), service.count("POST /api/v1/models/")) == (10, 2)


def test_a_failed_device_does_not_hold_up_the_others_and_is_tried_again_alone(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.failures["compile", "Samsung Galaxy S25 (Family)"] = "Op MatMul is beyond this chip."
    assert run(["hub", "link", str(small), "--devices", "SM8650,SM8750", *POLL, "--json"]) == 1
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert [device["soc"] for device in report["devices"]] == ["SM8650"]
    assert "3 of 6 jobs: got compile of" in printed.err and "Op MatMul is beyond this chip." in printed.err
    assert "Traceback" not in printed.err
    service.failures.clear()
    submitted = service.count(SUBMIT)
    report = answer(capsys, "link", str(small), "--devices", "SM8650,SM8750", *POLL)
    assert {job["state"] for job in report["jobs"]} == {"done"}
    assert service.count(SUBMIT) == submitted + 3


def test_force_submits_everything_again(service: AiHub, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer(capsys, "compile", str(small), "--devices", "SM8650", *POLL)
    answer(capsys, "compile", str(small), "--devices", "SM8650", "--force", *POLL)
    assert service.count(SUBMIT) == 4


def test_a_bundle_that_has_changed_since_is_refused_before_anything_is_asked(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(capsys, "compile", str(small), "--devices", "SM8650", "--no-wait")
    replace_in_manifest(small, '"producer": "', '"producer": "another ')
    asked = len(service.log)
    for command in (["status"], ["fetch"], ["link", "--devices", "SM8650"]):
        assert run(["hub", command[0], str(small), *command[1:]]) == 1
        assert "bundle_sha256: got the bundle has changed since it was submitted" in capsys.readouterr().err
    assert len(service.log) == asked


def test_a_damaged_job_file_is_named(service: AiHub, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer(capsys, "compile", str(small), "--devices", "SM8650", "--no-wait")
    (path,) = (small / "hub" / "jobs").glob(f"samsung*{DECODE}.json")
    path.write_text(path.read_text()[:-9])
    assert run(["hub", "status", str(small)]) == 1
    assert f"{path.name}: got " in capsys.readouterr().err
    path.unlink()
    path.symlink_to("/dev/zero")
    assert run(["hub", "status", str(small)]) == 1
    assert f"{path.name}: got a device, not a regular file; expected a job file" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_job_that_the_service_has_lost_is_named(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(capsys, "compile", str(small), "--devices", "SM8650", "--no-wait")
    service.jobs.clear()
    assert run(["hub", "status", str(small)]) == 1
    error = capsys.readouterr().err
    assert "could not be found" in error and "Submit it again with --force" in error
