"""What can go wrong between `edgekv hub` and the service, and how it is said: never a traceback, never the token."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgekv.cli import run
from tests.exporters.targets.aihub.test_aihub import POLL, answer
from tests.support.aihub_server import TOKEN, AiHub, Fault, configure
from tests.support.bundles import change_manifest


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> str:
    """The one line that a failing command prints."""
    assert run(["hub", *arguments]) == code
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err and TOKEN not in printed.err
    return printed.err.splitlines()[-1]


@pytest.mark.htp
@pytest.mark.parametrize(
    "fault",
    [
        Fault("GET", "/devices/", status=503, times=2),
        Fault("GET", "/devices/", kind="drop"),
        Fault("POST", "/jobs/", status=500),
        Fault("PUT", "/blob/model/", status=503),
        Fault("PUT", "/blob/model/", kind="drop"),
        Fault("GET", "/blob/model/", kind="cut"),
    ],
    ids=str,
)
def test_what_passes_is_tried_again(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str], fault: Fault
) -> None:
    service.faults.append(fault)
    report = answer(capsys, "compile", str(small), "--devices", "SM8650", *POLL)
    assert fault.times == 0 and {job["state"] for job in report["jobs"]} == {"done"}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            Fault("POST", "/jobs/", status=409, text="Too many graphs."),
            "submitting edgekv compile .*: got Too many gra",
        ),
        (
            Fault("POST", "/jobs/", status=400, text=f"You sent {TOKEN}."),
            r"got You sent \*\*\*; expected a request that the ser",
        ),
        (Fault("POST", "/models/", status=413, text="Too large."), "uploading ar1_cl64: got Too large"),
        (Fault("GET", "/devices/", status=401), "got an API token that the service rejects; .*qai-hub configure"),
        (Fault("GET", "/devices/", status=403, text="No access."), "listing devices: got No access"),
        (Fault("GET", "/devices/", status=426, text="Client too old."), "got Client too old"),
        (Fault("GET", "/devices/", status=503, times=99), "is unavailable right now|reported errors"),
        (Fault("POST", "/jobs/", status=429, text="Slow down.", times=99), "Wait a few minutes"),
        (Fault("GET", "/devices/", kind="drop", times=99), "Could not connect to"),
        (Fault("GET", "/devices/", status=200, text="<html>"), "got "),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_stays_is_said_in_the_services_words(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str], fault: Fault, said: str
) -> None:
    service.faults.append(fault)
    assert re.search(said, refused(capsys, "compile", str(small), "--devices", "SM8650", *POLL))


def test_a_service_that_is_down_is_named(
    service: AiHub, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        configure(tmp_path / "client.ini", f"http://127.0.0.1:{free.getsockname()[1]}")
        assert "Could not connect" in refused(capsys, "devices")


CONFIGURATIONS = {
    "no file": (None, "no such file"),
    "no ini file": (f"{TOKEN}\n", r"an unreadable file (MissingSectionHeaderError)"),
    "a field too few": (f"[api]\napi_token = {TOKEN}\n", "a field too few"),
    "no token": ("[api]\napi_token =\napi_url = http://127.0.0.1\nweb_url = x\n", "empty or not plain text"),
    "two lines of token": (
        f"[api]\napi_token = {TOKEN}\n  {TOKEN}\napi_url = http://127.0.0.1\nweb_url = x\n",
        "empty or not plain text",
    ),
    "no address": (f"[api]\napi_token = {TOKEN}\napi_url = 127.0.0.1\nweb_url = x\n", "an api_url that is no address"),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_that_cannot_be_used_says_where_the_token_comes_from(
    service: AiHub, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    text, said = CONFIGURATIONS[name]
    (tmp_path / "client.ini").unlink()
    if text is not None:
        (tmp_path / "client.ini").write_text(text)
    line = refused(capsys, "compile", str(small), "--devices", "SM8650", code=2)
    assert said in line and "https://workbench.aihub.qualcomm.com/account/" in line
    assert service.log == [] and not (small / "hub").exists()


def test_another_profile_of_the_client_can_be_named(
    service: AiHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "work.ini: got no such file" in refused(capsys, "devices", "--profile", "work", code=2)
    (tmp_path / ".qai_hub").mkdir()
    configure(tmp_path / ".qai_hub" / "work.ini", service.url)
    assert len(answer(capsys, "devices", "--profile", "work")["devices"]) == 5


def test_a_refused_token_is_said_so(service: AiHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(tmp_path / "client.ini", service.url, token="an-0ld-token")
    line = refused(capsys, "devices")
    assert "got an API token that the service rejects" in line and "an-0ld-token" not in line


@pytest.mark.parametrize(
    ("command", "devices", "said"),
    [
        ("compile", "Galaxy S99", r"Galaxy S99"),
        ("compile", "Samsung Galaxy S25 (Famly)", "expected Samsung Galaxy S25 (Family)"),
        (
            "compile",
            "SM8850",
            "got no hosted device with SM8850; expected a hosted device with one of QCS6490, SM8650",
        ),
        ("compile", "Pixel 9", "got a chip that edgekv does not know"),
        ("link", "QCS6490", "got a device without htp-supports-weight-sharing"),
        ("compile", " , ", "--devices: got none"),
    ],
)
def test_a_device_that_cannot_serve_is_refused_before_work_starts(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str], command: str, devices: str, said: str
) -> None:
    assert said in refused(capsys, command, str(small), "--devices", devices, code=2)
    assert service.log in ([], ["GET /api/v1/devices/"]) and not (small / "hub").exists()


def _hold_the_cache_in_16_bits(content: dict[str, Any]) -> None:
    content["kv_dtype"] = "s16"
    for name, encoding in content["encodings"].items():
        if name.startswith("past_"):
            encoding |= {"dtype": "s16", "zero_point": 0}


def test_a_16_bit_cache_is_refused_on_an_older_chip(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_manifest(small, _hold_the_cache_in_16_bits)
    line = refused(capsys, "compile", str(small), "--devices", "QCS6490", code=2)
    assert "got QCS6490 (V68); expected V73 or later, for the bundle's s16 cache" in line


def test_a_bundle_without_jobs_and_a_wrong_runtime_are_said_so(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "got none; expected at least one" in refused(capsys, "status", str(small), code=2)
    line = refused(capsys, "compile", str(small), "--devices", "SM8650", "--runtime", "tflite", code=2)
    assert "got 'tflite'; expected qnn_dlc or qnn_context_binary" in line


@pytest.mark.slow
def test_a_missing_client_is_named(small: Path) -> None:
    program = "import sys; sys.modules['qai_hub'] = None; from edgekv.cli import run; sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "hub", "devices"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ.copy())
    assert done.returncode == 1 and 'pip install "edgekv[hub]"' in done.stderr and "Traceback" not in done.stderr
