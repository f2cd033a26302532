"""Kits on a phone: a stand-in for adb, and for qnn-net-run one on the emulator."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from devices.report import read_report
from edgekv.cli import run
from edgekv.conformance.kit import Kit, read_arrays, unpack_binaries
from edgekv.machine.tensor_file import encode_tensors
from tests.support import kits
from tests.support.exports import ROOT
from tests.support.phones import PROPERTIES, VERSION, Phone, write_sdk

TOKENS = 3
TIMES = 'case "$*" in *"--num_inferences 1") ;; *) sleep 0.2;; esac'
"""A program that takes longer the more it has to do."""
FAULTS = """case "$*" in
*0_qnn*) kill -SEGV $$ ;;
*1_qnn*) touch "$ADB_PHONE/lost"; exit 255 ;;
*2_qnn*) echo "R5CX (SM-S928B) has no /data/local/tmp/x.so"; exit 5 ;;
esac"""
"""A graph that ends the program, one that restarts the phone, and one that is refused with the phone's names."""


@pytest.fixture
def phone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Phone:
    phone = Phone(tmp_path / "phone", monkeypatch, properties=PROPERTIES | {"ro.soc.model": kits.SOC})
    monkeypatch.setenv("QAIRT_SDK_ROOT", str(write_sdk(tmp_path / "sdk", TIMES, arch=79)))
    return phone


def program(phone: Phone, script: str) -> None:
    """Change what qnn-net-run does."""
    (phone.folder.parent / "sdk/bin/aarch64-android/qnn-net-run").write_text(script)


def on_phone(kit: Path, output: Path, *parts: str, minutes: str = "0", options: tuple[str, ...] = ()) -> int:
    chosen = [each for part in parts for each in ("--parts", part)]
    return run(
        [
            "conformance",
            "run",
            str(kit),
            "--on",
            "adb",
            "-o",
            str(output),
            "--minutes",
            minutes,
            "-q",
            *chosen,
            *options,
        ]
    )


def short(kit: Kit, folder: Path) -> Kit:
    """The kit with fewer golden tokens: each is a start of a program."""
    copy = Path(shutil.copytree(kit.path, folder))
    (model,) = kit.manifest.models
    golden = read_arrays(copy / model.golden)
    held = len(golden["prompt"]) + TOKENS - 1
    cut = {name: rows[:held] if name.startswith("rows.") else rows for name, rows in golden.items()}
    cut |= {name: golden[name][:TOKENS] for name in ("tokens", "logits")}
    (copy / model.golden).unlink()
    (copy / model.golden).write_bytes(encode_tensors(cut))
    return kits.sealed_again(copy)


@pytest.mark.htp
@pytest.mark.slow
def test_a_phone_computes_what_the_emulator_does(kit: Kit, phone: Phone, tmp_path: Path) -> None:
    """Graphs, golden tokens through a cache on this side, speeds and a long decode; no name of the phone is kept."""
    copy, output = short(kit, tmp_path / "kit"), tmp_path / "report.json"
    name = kit.manifest.models[0].name
    assert on_phone(copy.path, output, "speed", "watch", minutes="0.001") == 0
    measured = read_report(output)
    assert {(each.strategy, each.ar) for each in measured.speeds} == {("qnn-net-run", ar) for ar in (1, 8, 32, 128)}
    assert measured.samples[0].tokens_per_s > 0
    reasons = {each.what: each.reason for each in measured.unmeasured}
    assert "qnn-net-run binds memory of its own" in reasons["registering addresses"]
    assert "loads a graph" in reasons["load time alone"]
    wrappers, (model,) = Path(shutil.copytree(copy.path, tmp_path / "wrappers")), copy.manifest.models
    unpack_binaries(copy.path / model.binaries, wrappers / model.folder)
    (phone.folder / "kit").write_text(str(wrappers))
    program(phone, f"#!{sys.executable}\n" + (ROOT / "tests/support/phone_programs.py").read_text())
    assert on_phone(copy.path, output, "family", "operation", f"decode/{name}/pointer-shift") == 0
    found = read_report(output)
    assert {result.name: result.verdict for result in found.graphs} == {
        "operation/lpbq-product": "equal",
        "family/llama": "equal",
    }
    (decoded,) = found.decode
    assert (decoded.strategy, decoded.verdict, decoded.tokens) == ("pointer-shift", "equal", TOKENS)
    assert decoded.load_ms == 0
    assert (found.place, found.through, found.versions.qairt) == ("npu", "qnn-net-run over adb", VERSION)
    assert "R5CX" not in output.read_text() and "SM-S928B" not in output.read_text()
    left = {file for file in phone.files() if not file.endswith((".bin", ".so", "-run", "-app", ".edgekv-push"))}
    assert not left


@pytest.mark.slow
def test_a_program_that_crashes_is_named_and_a_phone_that_restarts_goes_on(phone: Phone, tmp_path: Path) -> None:
    kit = kits.plain_kit(tmp_path / "kit", ["operation/a", "operation/b", "operation/c"])
    output = tmp_path / "report.json"
    program(phone, f"#!/bin/sh\n{FAULTS}\n")
    pushes = []
    for code in (1, 1, 0):
        phone.set()
        assert on_phone(kit.path, output) == code
        pushes.append(phone.pushes)
    assert pushes[0] > 5 and pushes[1:] == [1, 1]  # libraries and kit are copied once, inputs for each graph
    found = read_report(output)
    assert [(each.part, each.attempts, each.ending) for each in found.failures] == [
        ("operation/a", 2, "SIGSEGV"),
        ("operation/b", 2, "the device or this program stopped while it ran"),
        ("operation/c", 1, "qnn-net-run on the phone: exit code 5: ... (...) has no x.so"),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"properties": PROPERTIES}, "got a kit for SM8750 (HTP V79); expected one for SM8650 (HTP V75)"),
        ({"states": {"R5CX": "unauthorized"}}, "adb: R5CX: got unauthorized"),
        ({"states": {}}, "adb: got no device; expected a phone"),
        ({"free_kib": 10}, "got 10.2 kB free"),
        ({"full_after": 2}, "got no space left; expected room for the file"),
        ({"lost_after": 2}, "expected a connected phone. Reconnect it and run the command again"),
    ],
)
def test_a_phone_that_cannot_run_a_kit_is_told(
    phone: Phone, tmp_path: Path, settings: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = kits.plain_kit(tmp_path / "kit")
    phone.set(**settings)
    assert on_phone(kit.path, tmp_path / "report.json") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report.json").exists()


def test_an_older_sdk_and_one_without_the_program_are_refused(
    phone: Phone, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = kits.plain_kit(tmp_path / "kit")
    older, other = (
        write_sdk(tmp_path / name, TIMES, arch=79, version=version)
        for name, version in (("a", "2.45.1"), ("b", VERSION))
    )
    (other / "bin/aarch64-android/qnn-net-run").unlink()
    for sdk, message in ((older, "QAIRT 2.51.0; expected at most the 2.45.1"), (other, "got no qnn-net-run in")):
        assert on_phone(kit.path, tmp_path / "report.json", options=("--qairt", str(sdk))) == 1
        assert message in capsys.readouterr().err
    assert not phone.files()


@pytest.mark.slow
def test_results_of_another_size_and_missing_ones_are_no_results(phone: Phone, tmp_path: Path) -> None:
    """A runtime that writes nothing, and one that writes half."""
    kit, output = kits.plain_kit(tmp_path / "kit", ["operation/a"]), tmp_path / "report.json"
    half = """for folder in outputs/Result_0 outputs/Result_1; do
    mkdir -p $folder
    for each in x y; do head -c 8 /dev/zero > $folder/${each}_q_native.raw; done
    done"""
    found = {}
    for name, script in {"nothing": "mkdir -p outputs", "half": half}.items():
        program(phone, f"#!/bin/sh\n{script}\n")
        assert on_phone(kit.path, output) == 0
        (found[name],) = read_report(output).graphs
    assert (found["nothing"].verdict, found["half"].verdict) == ("failed", "wrong")
    assert "no results" in found["nothing"].note and found["half"].differing == found["half"].elements
