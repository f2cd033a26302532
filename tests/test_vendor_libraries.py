"""Qualcomm's libraries on each platform that has a wheel; files are named as in onnxruntime-qnn 2.7.0."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

from devices import find
from edgekv.doctor.libraries import find_libraries, libraries
from edgekv.errors import EngineError
from edgekv.qnn import check_libraries
from edgekv.vendor_libraries import PACKAGE, Platform, find_places, search_paths, skel_versions

LINUX, BOARD, LAPTOP = Platform("linux", "x86_64"), Platform("linux", "arm64"), Platform("windows", "arm64")
WHEELS = {
    LINUX: ("libGenie.so", "libQnnHtp.so", "libQnnSystem.so"),
    BOARD: (
        "libGenie.so",
        "libQnnHtp.so",
        "libQnnSystem.so",
        *(f"libQnnHtpV{arch}{kind}.so" for arch in (68, 69, 73, 75, 79, 81) for kind in ("Skel", "Stub")),
    ),
    LAPTOP: (
        "Genie.dll",
        "QnnHtp.dll",
        "QnnSystem.dll",
        *(f"QnnHtpV{arch}Stub.dll" for arch in (68, 73, 81)),
        *(f"libQnnHtpV{arch}Skel.so" for arch in (68, 73, 81)),
    ),
}


def _write(folder: Path, names: tuple[str, ...], version: str = "2.51.0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"\0ELF\0" + f"AISW_VERSION: {version}\n".encode() + b"\0")
    return folder


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the package onnxruntime_qnn."""
    folder = _write(tmp_path / PACKAGE, ())
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    return folder


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A board's device files, and FastRPC."""
    monkeypatch.setattr("edgekv.doctor.libraries.find_library", lambda name: f"lib{name}.so.1")
    folder = tmp_path / "dev"
    folder.mkdir()
    (folder / "fastrpc-cdsp").touch()
    return folder


@pytest.mark.parametrize(
    ("system", "machine", "found"),
    [
        ("linux", "x86_64", LINUX),
        ("linux", "aarch64", BOARD),
        ("win32", "ARM64", LAPTOP),
        ("win32", "AMD64", Platform("windows", "x86_64")),
        ("darwin", "arm64", Platform("macos", "arm64")),
        ("android", "aarch64", Platform("android", "arm64")),
    ],
)
def test_the_platform_is_recognized(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, found: Platform
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert Platform.here() == found
    assert found.has_npu == (machine != "x86_64" and machine != "AMD64" and system != "darwin")


def test_libraries_are_named_as_on_each_platform() -> None:
    assert [on.library("Genie") for on in (BOARD, LAPTOP)] == ["libGenie.so", "Genie.dll"]
    assert [on.stub(73) for on in (BOARD, LAPTOP)] == ["libQnnHtpV73Stub.so", "QnnHtpV73Stub.dll"]


@pytest.mark.parametrize(
    ("on", "archs"), [(LINUX, []), (BOARD, [68, 69, 73, 75, 79, 81]), (LAPTOP, [68, 73, 81])], ids=str
)
def test_a_wheel_is_found_with_what_it_runs(wheel: Path, on: Platform, archs: list[int]) -> None:
    assert find_places(on, {}) == []
    _write(wheel, WHEELS[on])
    (place,) = find_places(on, {})
    assert (place.folder, place.origin) == (wheel, PACKAGE)
    assert place.archs(on) == archs and place.versions(on) == {"2.51.0"} and place.has("Genie", on)
    assert place.archs(LAPTOP if on == BOARD else BOARD) == []


def test_the_user_s_folder_and_the_sdk_are_found(wheel: Path, tmp_path: Path) -> None:
    _write(wheel, WHEELS[BOARD])
    own = _write(tmp_path / "own", WHEELS[BOARD][:5])
    target = _write(tmp_path / "sdk" / "lib" / "aarch64-oe-linux-gcc11.2", WHEELS[BOARD], "2.39.0")
    for file in target.glob("*Skel.so"):
        arch = file.name[len("libQnnHtpV") :][:2]
        _write(tmp_path / "sdk" / "lib" / f"hexagon-v{arch}" / "unsigned", (file.name,), "2.39.0")
        file.unlink()
    environment = {"EDGEKV_QNN_DIR": str(own), "QNN_SDK_ROOT": str(tmp_path / "sdk")}
    places = find_places(BOARD, environment)
    assert [place.origin for place in places] == ["EDGEKV_QNN_DIR", PACKAGE, "QNN_SDK_ROOT"]
    assert [len(place.archs(BOARD)) for place in places] == [1, 6, 6]
    assert [place.versions(BOARD) for place in places] == [{"2.51.0"}, {"2.51.0"}, {"2.39.0"}]
    assert [place.origin for place in find_places(LAPTOP, environment)] == []


def test_libraries_of_the_folder_come_before_others() -> None:
    found = search_paths(Path("new"), BOARD, {"LD_LIBRARY_PATH": "old", "ADSP_LIBRARY_PATH": "dsp;vendor"})
    assert found == {"LD_LIBRARY_PATH": f"new{os.pathsep}old", "ADSP_LIBRARY_PATH": "new;dsp;vendor"}
    assert search_paths(Path("new"), LAPTOP, {}) == {"PATH": "new"}
    assert search_paths(Path("new"), LINUX, {}) == {"LD_LIBRARY_PATH": "new"}


def test_a_chip_whose_htp_the_libraries_do_not_run_is_refused(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(wheel, WHEELS[LAPTOP])
    check_libraries(find("SM8650"))  # the emulator runs all
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(platform, "machine", lambda: "ARM64")
    check_libraries(find("SC8380XP"))
    with pytest.raises(EngineError, match=r"SM8650 on this machine: got libraries for V68, V73, V81; expected V75"):
        check_libraries(find("SM8650"))


def test_the_doctor_says_what_is_there(wheel: Path, devices: Path, tmp_path: Path) -> None:
    assert find_libraries(BOARD, {}, devices).status == "missing"
    _write(wheel, WHEELS[BOARD])
    finding = find_libraries(BOARD, {}, devices)
    assert (finding.status, finding.fix) == ("works", "")
    assert finding.detail == f"QAIRT 2.51.0 in {PACKAGE}: for V68, V69, V73, V75, V79, V81"
    sdk = _write(tmp_path / "sdk" / "lib" / "aarch64-ubuntu-gcc9.4", WHEELS[BOARD], "2.39.0")
    finding = find_libraries(BOARD, {"QAIRT_SDK_ROOT": str(tmp_path / "sdk")}, devices)
    assert finding.status == "works" and f"QAIRT 2.39.0 in {sdk} (QAIRT_SDK_ROOT, not used)" in finding.detail


def test_an_sdk_alone_calls_nothing(wheel: Path, devices: Path, tmp_path: Path) -> None:
    _write(tmp_path / "own", WHEELS[BOARD])
    finding = find_libraries(BOARD, {"EDGEKV_QNN_DIR": str(tmp_path / "own")}, devices)
    assert finding.status == "missing" and 'pip install "edgekv[htp]"' in finding.fix


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        ("mixed", "Libraries of 2.39.0 and 2.51.0 are mixed"),
        ("no Genie", "libGenie.so missing"),
        ("no skels", "No pair of libQnnHtpV73Stub.so and its skel"),
        ("other skels", "ADSP_LIBRARY_PATH has skels of 2.39.0"),
        ("no driver", "none of fastrpc-cdsp"),
        ("no permission", "fastrpc-cdsp cannot be opened"),
        ("no FastRPC", "libcdsprpc.so is missing"),
    ],
)
def test_what_keeps_a_board_from_its_htp_is_named(
    wheel: Path, devices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, fix: str
) -> None:
    _write(wheel, WHEELS[BOARD])
    skels = tuple(name for name in WHEELS[BOARD] if "Skel" in name)
    environment = {}
    if wrong == "mixed":
        _write(wheel, skels[:1], "2.39.0")
    elif wrong == "no Genie":
        (wheel / "libGenie.so").unlink()
    elif wrong == "no skels":
        for name in skels:
            (wheel / name).unlink()
    elif wrong == "other skels":
        environment["ADSP_LIBRARY_PATH"] = f"{tmp_path / 'none'};{_write(tmp_path / 'dsp', skels[:1], '2.39.0')}"
    elif wrong == "no driver":
        (devices / "fastrpc-cdsp").unlink()
    elif wrong == "no permission":
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    else:
        monkeypatch.setattr("edgekv.doctor.libraries.find_library", lambda name: None)
    finding = find_libraries(BOARD, environment, devices)
    assert finding.status == "broken" and fix in finding.fix


def test_files_that_say_no_version_have_none(tmp_path: Path) -> None:
    (tmp_path / "libQnnHtpV73Skel.so").touch()
    (tmp_path / "libQnnHtpV75Skel.so").write_bytes(b"ELF")
    (tmp_path / "libQnnHtpV79Skel.so").mkdir()
    assert skel_versions([tmp_path, tmp_path / "none"]) == set()


@pytest.mark.htp
def test_the_installed_wheel_is_of_one_version() -> None:
    finding = libraries()
    assert (finding.status, finding.fix) == ("works", "")
    assert finding.detail.endswith(": QAIRT 2.51.0 in onnxruntime_qnn: emulator only")
