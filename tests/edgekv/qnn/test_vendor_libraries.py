"""Qualcomm's libraries on each platform that has a wheel; files are named as in onnxruntime-qnn 2.7.0."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

import edgekv
from devices import find
from edgekv.doctor.libraries import find_libraries, libraries
from edgekv.errors import EngineError
from edgekv.qnn.library_fault import FOR_GRAPHS, check_libraries
from edgekv.qnn.this_chip import find_chip
from edgekv.qnn.vendor_libraries import (
    LIBRARIES,
    PACKAGE,
    Platform,
    find_places,
    library_version,
    search_paths,
)
from exporters.targets.genie.dialog import TESTED, GenieDialog

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


def test_the_emulator_runs_every_chip(wheel: Path) -> None:
    _write(wheel, ("libQnnHtp.so",))
    check_libraries(FOR_GRAPHS, 75, LINUX, None, {})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("no backend", "got no libQnnHtp.so in "),
        ("no system", "got no libQnnSystem.so in "),
        ("other chip", "got libraries for V68, V69, V73, V79, V81; expected for V75. Export with the --device"),
        ("older chip", "got V73, the HTP of QCS9100; expected V75 or newer. Export with --device QCS9100"),
        ("no skel", "got no libQnnHtpV75Skel.so in "),
        ("no stub", "got no libQnnHtpV75Stub.so in "),
        ("no skels", "got no pair of libQnnHtpV73Stub.so and its skel"),
        ("mixed skel", "2.39.0 (libQnnHtpV75Skel.so), 2.51.0 (libQnnHtp.so and 2 more); expected one version."),
        ("mixed backend", "2.39.0 (libQnnHtp.so), 2.51.0 (libQnnSystem.so and 2 more); expected one version."),
        ("other skel", "got ADSP_LIBRARY_PATH has libQnnHtpV75Skel.so of 2.39.0 in "),
        ("other stub", "got LD_LIBRARY_PATH has libQnnHtpV75Stub.so of 2.39.0 in "),
        ("no permission", "fastrpc-cdsp cannot be opened; expected read and write permission. Add yourself"),
    ],
)
def test_loading_on_a_board_refuses_libraries_that_would_fail(
    wheel: Path, devices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, said: str
) -> None:
    stub, skel = "libQnnHtpV75Stub.so", "libQnnHtpV75Skel.so"
    _write(wheel, WHEELS[BOARD])
    _write(wheel, ("libQnnHtpV68Skel.so",), "2.39.0")  # not this chip's
    sdk, environment, chip = tmp_path / "sdk", {}, None
    check_libraries(LIBRARIES, 75, BOARD, chip, environment, devices)
    if wrong == "other chip":
        (wheel / stub).unlink()
        (wheel / skel).unlink()
    elif wrong == "older chip":
        chip = find("QCS9075")
    elif wrong == "no skels":
        for name in WHEELS[BOARD][3:]:
            (wheel / name).unlink()
    elif wrong.startswith("no ") and wrong != "no permission":
        name = {"no backend": "libQnnHtp.so", "no system": "libQnnSystem.so", "no skel": skel, "no stub": stub}[wrong]
        (wheel / name).unlink()
    elif wrong.startswith("mixed"):
        _write(wheel, ("libQnnHtp.so" if wrong == "mixed backend" else skel,), "2.39.0")
    elif wrong == "other skel":
        environment["ADSP_LIBRARY_PATH"] = f"{tmp_path};{_write(sdk, (skel, 'libQnnHtpV81Skel.so'), '2.39.0')}"
    elif wrong == "other stub":
        environment["LD_LIBRARY_PATH"] = f"{tmp_path}{os.pathsep}{_write(sdk, (stub,), '2.39.0')}"
    else:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(EngineError) as error:
        check_libraries(FOR_GRAPHS, 75, BOARD, chip, environment, devices)
    assert said in str(error.value) and str(error.value).startswith("HTP V75 on this machine: got ")


def test_folders_of_the_same_version_may_be_named(wheel: Path, devices: Path) -> None:
    _write(wheel, WHEELS[BOARD])
    named = {"ADSP_LIBRARY_PATH": f"{wheel};/dsp", "LD_LIBRARY_PATH": str(wheel)}
    check_libraries(LIBRARIES, 73, BOARD, find("QCS9075"), named, devices)


def test_a_newer_chip_is_asked_for_its_own_libraries(wheel: Path, devices: Path) -> None:
    _write(wheel, WHEELS[LAPTOP])
    check_libraries(FOR_GRAPHS, 68, LAPTOP, find("SC8380XP"), {}, devices)
    (wheel / "libQnnHtpV73Skel.so").unlink()
    with pytest.raises(EngineError, match=r"no libQnnHtpV73Skel\.so"):
        check_libraries(FOR_GRAPHS, 68, LAPTOP, find("SC8380XP"), {}, devices)


MIXED = r"HTP V75 on this machine: got libraries of two versions: 2\.39\.0 \(libQnnHtpV75Skel\.so\), 2\.51\.0"


@pytest.fixture
def mixed(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Libraries of two versions, on a board."""
    monkeypatch.setattr(Platform, "here", classmethod(lambda cls: BOARD))
    _write(wheel, WHEELS[BOARD])
    return _write(wheel, ("libQnnHtpV75Skel.so",), "2.39.0")


def test_a_model_is_not_loaded_with_them(mixed: Path, bundle: Path) -> None:
    with pytest.raises(EngineError, match=MIXED):
        edgekv.load(bundle, engine="htp")
    assert PACKAGE not in sys.modules


def test_genie_is_not_loaded_with_them(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: TESTED)
    monkeypatch.setattr("exporters.targets.genie.dialog.Child", None)
    with pytest.raises(EngineError, match=MIXED):
        GenieDialog(tmp_path, None, arch=75)


@pytest.mark.parametrize(
    ("file", "text", "soc"),
    [
        ("sys/devices/soc0/machine", "QCS9075\n", "QCS9100"),
        ("proc/device-tree/compatible", "qcom,qcs6490-rb3gen2\0qcom,qcm6490\0", "QCS6490"),
        ("sys/devices/soc0/machine", "Some board\n", None),
        ("proc/device-tree/compatible", "raspberrypi,5-model-b\0brcm,bcm2712\0", None),
    ],
)
def test_a_board_s_chip_is_known_by_what_linux_says(tmp_path: Path, file: str, text: str, soc: str | None) -> None:
    assert find_chip(BOARD, tmp_path) is None
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    found = find_chip(BOARD, tmp_path)
    assert (found and found.soc) == soc and find_chip(LINUX, tmp_path) is None


def test_a_laptop_s_chip_is_known_by_its_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"ProcessorNameString": ("Snapdragon(R) X Elite - X1E80100 - Qualcomm(R) Oryon(TM) CPU", 1)}
    opened: list[str] = []
    registry = ModuleType("winreg")
    registry.HKEY_LOCAL_MACHINE = None
    registry.OpenKey = lambda root, path: nullcontext(opened.append(path))
    registry.QueryValueEx = lambda key, name: names[name]
    monkeypatch.setitem(sys.modules, "winreg", registry)
    assert find_chip(LAPTOP) == find("SC8380XP")
    assert opened == ["HARDWARE\\DESCRIPTION\\System\\CentralProcessor\\0"]
    names["ProcessorNameString"] = ("Ampere(R) Altra(R)", 1)
    assert find_chip(LAPTOP) is None


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
        ("mixed", "Libraries of two versions: 2.39.0 (libQnnHtpV68Skel.so), 2.51.0 (libQnnHtp.so and 13 more)"),
        ("no Genie", "No libGenie.so in"),
        ("no skels", "No pair of libQnnHtpV73Stub.so and its skel"),
        ("other skels", "ADSP_LIBRARY_PATH has libQnnHtpV68Skel.so of 2.39.0"),
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
    names = [f"libQnnHtpV{arch}Skel.so" for arch in (73, 75, 79, 81)]
    assert [library_version(tmp_path / name) for name in names] == [None] * 4


@pytest.mark.htp
def test_the_installed_wheel_is_of_one_version() -> None:
    finding = libraries()
    assert (finding.status, finding.fix) == ("works", "")
    assert finding.detail.endswith(": QAIRT 2.51.0 in onnxruntime_qnn: emulator only")
