"""Options of the engine htp: read by name, and what of them reaches Qualcomm's provider."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import edgekv
from devices import Device, find
from edgekv.bundle import Bundle, open_bundle
from edgekv.cli import run
from edgekv.doctor.samples import onnx_norm_case, write_onnx_norm
from edgekv.errors import UsageError
from edgekv.qnn.options import HtpOptions
from edgekv.qnn.provider import EP_NAME, best_device, create_session
from edgekv.qnn.vendor_libraries import Platform
from edgekv.runtime import HtpEngine

CHIP = find("SM8650")
EACH = (
    "performance=burst",
    "performance=extreme_power_saver",
    "rpc-latency=100",
    "priority=high",
    "vtcm=4",
    "optimization=3",
    "device=0",
    "mapped-weights=no",
)


@pytest.fixture(scope="module")
def norm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("norm") / "norm.onnx"
    write_onnx_norm(path)
    return path


def test_all_options_are_read() -> None:
    text = "performance=low_balanced, rpc-latency=50,priority=normal_high,vtcm=2,optimization=1,device=1"
    read = HtpOptions.parse(f"{text},shared-memory=yes,mapped-weights=no")
    assert read == HtpOptions("low_balanced", 50, "normal_high", 2, 1, 1, True, False)
    assert HtpOptions.parse("") == HtpOptions() and HtpOptions().provider_options == {}
    assert len(read.provider_options) == len(fields(HtpOptions))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("performance=fast", r"htp performance: got 'fast'; expected burst, "),
        ("performance", r"htp performance: got ''"),
        ("priority=9", r"htp priority: got '9'; expected low, normal, normal_high, high"),
        ("rpc-latency=-1", r"htp rpc-latency: got -1; expected 0 to 1000000 \(microseconds\)"),
        ("rpc-latency=1.5", r"htp rpc-latency: got '1.5'; expected a whole number"),
        ("vtcm=0", r"htp vtcm: got 0"),
        ("optimization=4", r"htp optimization: got 4; expected 1 to 3"),
        ("device=-1", r"htp device: got -1"),
        ("shared-memory=1", r"htp shared-memory: got '1'; expected yes, no or auto"),
        ("burst", r"htp: got 'burst'; expected performance, "),
        ("polling=9999", r"htp: got 'polling'"),
        ("vtcm=2,vtcm=4", r"htp vtcm: got given twice"),
    ],
)
def test_what_the_provider_would_ignore_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        HtpOptions.parse(text)


def test_options_that_a_chip_or_a_machine_lacks_are_refused() -> None:
    laptop = Platform("windows", "arm64")
    HtpOptions(vtcm_mb=8, shared_memory=True).check(CHIP, laptop)
    with pytest.raises(UsageError, match=r"htp vtcm: got 9; expected 1 to 8 \(MiB of SM8650\)"):
        HtpOptions(vtcm_mb=9).check(CHIP, laptop)
    with pytest.raises(UsageError, match=r"htp shared-memory: got yes on linux x86_64; expected no"):
        HtpOptions(shared_memory=True).check(CHIP, Platform("linux", "x86_64"))


def test_other_engines_have_none(small_export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(small_export), "--prompt", "a", "--htp", "performance=burst"]) == 2
    assert "htp: got options with the engine cpu; expected none" in capsys.readouterr().err


def test_the_npu_is_chosen_among_several_devices() -> None:
    kinds = ort.OrtHardwareDeviceType
    devices: list[Any] = [
        SimpleNamespace(device=SimpleNamespace(type=kind)) for kind in (kinds.GPU, kinds.CPU, kinds.NPU)
    ]
    assert best_device(devices) is devices[2] and best_device(devices[:2]) is devices[0]


@pytest.mark.htp
@pytest.mark.parametrize("text", EACH)
def test_the_provider_takes_each_option(norm: Path, text: str) -> None:
    options = HtpOptions.parse(text)
    session = HtpEngine(CHIP).with_options(options).session(norm)
    reached = session.get_provider_options()[EP_NAME]
    assert {**options.provider_options, "soc_model": "57"}.items() <= reached.items()
    x, wanted = onnx_norm_case()
    assert np.abs(session.run(["y"], {"x": x})[0].astype(int) - wanted).max() <= 8


@pytest.mark.htp
@pytest.mark.parametrize(
    ("options", "found"),
    [
        (HtpOptions(), {b"vtcm_size=8388608", b"OpO=2"}),
        (HtpOptions(vtcm_mb=2, optimization=3), {b"vtcm_size=2097152", b"OpO=3"}),
    ],
)
def test_graphs_are_compiled_with_the_options(
    norm: Path, tmp_path: Path, options: HtpOptions, found: set[bytes]
) -> None:
    config = {"ep.context_enable": "1", "ep.context_embed_mode": "0", "ep.context_file_path": str(tmp_path / "c.onnx")}
    create_session(norm, CHIP, session_config=config, provider_options=options.provider_options)
    (binary,) = tmp_path.glob("*.bin")
    assert {*re.findall(rb"vtcm_size=\d+|OpO=\d", binary.read_bytes())} == found


@pytest.mark.htp
def test_options_are_recorded_and_change_no_token(small_export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(small_export), "--prompt", "a", "--max-new-tokens", "4", "--engine", "htp", "--json"]
    assert run(command) == 0
    plain = json.loads(capsys.readouterr().out)
    assert run([*command, "--htp", "performance=burst,vtcm=4"]) == 0
    tuned = json.loads(capsys.readouterr().out)
    assert tuned["tokens"] == plain["tokens"]
    assert plain["stats"]["setup"]["htp"]["performance"] is None
    assert (tuned["stats"]["setup"]["htp"]["performance"], tuned["stats"]["setup"]["htp"]["vtcm_mb"]) == ("burst", 4)


@pytest.mark.htp
@pytest.mark.slow
def test_binaries_keep_what_they_were_compiled_for(wide_on_htp: Path) -> None:
    with edgekv.load(wide_on_htp, "htp", htp=edgekv.HtpOptions("burst")) as model:
        assert len(model.score([1, 2, 3])) == 3
    with pytest.raises(UsageError, match=r"htp vtcm, optimization: got one of them for compiled binaries"):
        edgekv.load(wide_on_htp, "htp", htp="optimization=3")


@pytest.mark.htp
@pytest.mark.slow
def test_an_npu_loads_the_binary_of_all_graphs_once(wide_on_htp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not yet run on hardware: the emulator cannot load it, so its wrappers are replaced by those of single graphs."""
    bundle = open_bundle(wide_on_htp)
    alone = HtpEngine.on(CHIP, bundle)
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "aarch64")
        shared = HtpEngine.on(CHIP, bundle)
    assert not alone.shares_weights and shared.shares_weights
    assert [path.name for path in shared.compiled.values()] == [
        f"shared_{path.name}" for path in alone.compiled.values()
    ]
    sharing = HtpEngine(CHIP, alone.compiled, shares_weights=True)
    for graph in alone.compiled:
        assert [each.name for each in sharing.session(graph).get_inputs()] == [
            each.name for each in alone.session(graph).get_inputs()
        ]


@pytest.mark.htp
@pytest.mark.slow
def test_a_bundle_is_compiled_with_the_options(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compile", str(small), "--device", CHIP.soc, "--no-per-graph-binaries", "--json", "--force"]
    assert run([*command, "--htp", "vtcm=4,optimization=3"]) == 0
    assert json.loads(capsys.readouterr().out)["vtcm_bytes"] == 4 << 20
    binaries = [path.read_bytes() for path in (small / "compiled" / CHIP.soc).glob("*.bin")]
    assert binaries and all(b"vtcm_size=4194304" in each and b"OpO=3" in each for each in binaries)
    before = {path: path.read_bytes() for path in small.rglob("*") if path.is_file()}
    for wrong in ("performance=burst", "vtcm=9", "optimization=0"):
        assert run([*command, "--htp", wrong]) == 2
    assert before == {path: path.read_bytes() for path in small.rglob("*") if path.is_file()}


def test_binaries_of_all_graphs_are_for_an_npu_from_v73(monkeypatch: pytest.MonkeyPatch, small_export: Path) -> None:
    bundle, kinds = open_bundle(small_export), list[bool]()

    def wrappers(bundle: Bundle, device: Device, *, is_shared: bool) -> dict[Path, Path]:
        kinds.append(is_shared)
        return {}

    monkeypatch.setattr("edgekv.runtime.htp._wrappers", wrappers)
    assert HtpEngine.on(CHIP, bundle) == HtpEngine(CHIP)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    for soc in ("QCS6490", "SM8550"):
        HtpEngine.on(find(soc), bundle)
    assert kinds == [False, False, True, False]


@pytest.mark.htp
@pytest.mark.slow
def test_the_fastest_level_is_found_by_simulation(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compile", str(small), "--device", CHIP.soc, "--no-per-graph-binaries", "--json", "--force"]
    assert run([*command, "--htp", "optimization=fastest"]) == 0
    (binary,) = json.loads(capsys.readouterr().out)["binaries"]
    assert binary["optimization"] in (1, 2, 3)
    content = (small / "compiled" / CHIP.soc / binary["file"]).read_bytes()
    assert f"OpO={binary['optimization']}".encode() in content


@pytest.mark.htp
def test_binaries_are_compiled_at_level_3_unless_another_is_asked_for(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compile", str(small), "--device", CHIP.soc, "--no-per-graph-binaries", "--json"]) == 0
    (binary,) = json.loads(capsys.readouterr().out)["binaries"]
    assert binary["optimization"] == 3
    assert b"OpO=3" in (small / "compiled" / CHIP.soc / binary["file"]).read_bytes()


def test_a_level_to_be_found_is_for_compiling_alone(small: Path) -> None:
    with pytest.raises(UsageError, match=r"optimization: got fastest; expected 1 to 3.*edgekv compile"):
        edgekv.load(small, "htp", htp="optimization=fastest")
