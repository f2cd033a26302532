"""Qualcomm's libraries: what they are called on each platform, and where they are.

Names and folders are those of the wheels of onnxruntime-qnn 2.7.0 for Linux and Windows, on x86-64 and Arm64, and of
Qualcomm's public description of its SDK (backend libraries by target platform).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Literal

FOLDER_VARIABLE = "EDGEKV_QNN_DIR"
SDK_VARIABLES = ("QAIRT_SDK_ROOT", "QNN_SDK_ROOT")
PACKAGE = "onnxruntime_qnn"
BACKEND = "QnnHtp"
SYSTEM = "QnnSystem"
LIBRARIES = (BACKEND, SYSTEM, "Genie")
"""What running a bundle needs: the HTP's backend, what reads binaries, and Genie."""
SKEL_VARIABLE = "ADSP_LIBRARY_PATH"
"""Where the HTP searches its own libraries: folders with `;` between them, on every system."""

System = Literal["linux", "android", "windows", "macos"]
Machine = Literal["x86_64", "arm64"]

_SKEL = re.compile(r"libQnnHtpV(\d+)Skel\.so")
_STATED = b"AISW_VERSION: "
_NUMBERS = re.compile(rb"\d+\.\d+\.\d+")
# Context binaries have this form, with the build's number behind it.
_BUILD = re.compile(rb"v(\d{1,3}\.\d{1,3}\.\d{1,3})\.\d{9,14}")
_RPC_SERVICE = r"SYSTEM\CurrentControlSet\Services\qcnspmcdm"
_SDK_TARGETS: dict[tuple[System, Machine], tuple[str, ...]] = {
    ("linux", "x86_64"): ("x86_64-linux-clang",),
    ("linux", "arm64"): ("aarch64-oe-linux-gcc11.2", "aarch64-ubuntu-gcc9.4", "aarch64-oe-linux-gcc9.3"),
    ("android", "arm64"): ("aarch64-android",),
    ("windows", "x86_64"): ("x86_64-windows-msvc",),
    ("windows", "arm64"): ("aarch64-windows-msvc", "arm64x-windows-msvc"),
}
# The wheel for Windows on x86-64 has the libraries of emulated processes on Arm64 too.
_WHEEL_FOLDERS = (".", "libs/amd64")


@dataclass(frozen=True, slots=True)
class Platform:
    """An operating system and a processor."""

    system: System
    machine: Machine

    @classmethod
    def here(cls) -> Platform:
        """The one that this process runs on. Every Unix that is neither Android nor macOS counts as Linux."""
        systems: dict[str, System] = {"win32": "windows", "darwin": "macos", "android": "android"}
        is_arm = platform.machine().lower() in ("arm64", "aarch64")
        # Before Python 3.13 Android calls itself linux.
        default: System = "android" if hasattr(sys, "getandroidapilevel") else "linux"
        return cls(systems.get(sys.platform, default), "arm64" if is_arm else "x86_64")

    @property
    def has_npu(self) -> bool:
        """Whether the HTP of such a machine may be real; on x86-64 it is emulated."""
        return self.machine == "arm64" and self.system != "macos"

    @property
    def search_variable(self) -> str:
        """The variable with the folders in which libraries are searched."""
        return {"windows": "PATH", "macos": "DYLD_LIBRARY_PATH"}.get(self.system, "LD_LIBRARY_PATH")

    @property
    def suffix(self) -> str:
        """What the files of libraries end with."""
        return {"windows": ".dll", "macos": ".dylib"}.get(self.system, ".so")

    def library(self, name: str) -> str:
        """The file of a library of Qualcomm's, such as `libGenie.so` or `Genie.dll`."""
        return f"{'' if self.system == 'windows' else 'lib'}{name}{self.suffix}"

    def stub(self, arch: int) -> str:
        """The file of the library through which the processor calls an HTP of this version."""
        return self.library(f"QnnHtpV{arch}Stub")


@dataclass(frozen=True, slots=True)
class LibraryPlace:
    """A folder with Qualcomm's libraries.

    Attributes:
        folder: with the libraries for the processor.
        skels: the folders with those that run on the HTP, which are ELF files on every system.
        origin: what names the folder: a variable, or the package.
    """

    folder: Path
    skels: tuple[Path, ...]
    origin: str

    def has(self, name: str, on: Platform) -> bool:
        """Whether a library is in the folder."""
        return (self.folder / on.library(name)).is_file()

    def skel(self, arch: int) -> Path:
        """The file that runs on an HTP of this version; it need not be there."""
        files = [folder / skel(arch) for folder in self.skels]
        return next((file for file in files if file.is_file()), (files or [self.folder / skel(arch)])[0])

    def archs(self, on: Platform) -> list[int]:
        """The versions of the HTP for which both stub and skel are there, ascending."""
        files = [file.name for folder in self.skels for file in folder.glob("*")]
        archs = {int(match[1]) for match in map(_SKEL.fullmatch, files) if match}
        return sorted(arch for arch in archs if (self.folder / on.stub(arch)).is_file())

    def versions(self, on: Platform) -> set[str]:
        """The versions of Qualcomm's SDK that the libraries and skels are from, such as `2.51.0`: one, if not mixed."""
        names = [on.library(name) for name in LIBRARIES] + [on.stub(arch) for arch in self.archs(on)]
        skels = (file for folder in self.skels for file in folder.glob("*") if _SKEL.fullmatch(file.name))
        versions = (library_version(file) for file in (*(self.folder / name for name in names), *skels))
        return {version for version in versions if version is not None}


def find_places(on: Platform, environment: Mapping[str, str] = os.environ) -> list[LibraryPlace]:
    """The folders with Qualcomm's libraries: the user's own, that of the package, and that of the SDK, in this order.

    A folder that a variable names counts if it has the HTP's backend.
    """
    return [place for place in _candidates(on, environment) if place.has(BACKEND, on)]


def package_place(on: Platform) -> LibraryPlace | None:
    """The folder of the package, whose libraries edgekv runs; None if it is not installed."""
    places = list(_candidates(on, {}))
    return next((place for place in places if place.has(BACKEND, on)), places[0] if places else None)


def rpc_memory(on: Platform) -> str:
    """The library that allocates memory for processor and HTP, as Qualcomm's provider looks for it.

    On Windows it is in the folder of the driver of the service `qcnspmcdm`.

    Raises:
        OSError: this machine has no such service.
    """
    if on.system != "windows":
        return "libcdsprpc.so"
    import winreg

    with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _RPC_SERVICE) as service:  # type: ignore[attr-defined,unused-ignore]
        driver = str(winreg.QueryValueEx(service, "ImagePath")[0])  # type: ignore[attr-defined,unused-ignore]
    return driver.replace("\\SystemRoot", os.environ.get("SYSTEMROOT", "")).rpartition("\\")[0] + "\\libcdsprpc.dll"


def has_rpc_memory(on: Platform) -> bool:
    """Whether that library is here and can be loaded."""
    try:
        ctypes.CDLL(rpc_memory(on))
    except OSError:
        return False
    return True


def search_paths(folder: Path, on: Platform, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables with which a process finds the libraries of a folder, and the HTP its own ones there.

    Folders that the environment names come after it, so that libraries of two versions are not mixed.
    """
    separators = {on.search_variable: os.pathsep}
    if on.has_npu and on.system != "windows":  # Windows has skels of its own beside the driver
        separators[SKEL_VARIABLE] = ";"
    return {
        name: between.join(filter(None, [str(folder), environment.get(name)])) for name, between in separators.items()
    }


def skel(arch: int) -> str:
    """The file of the library that runs on an HTP of this version."""
    return f"libQnnHtpV{arch}Skel.so"


def library_version(file: Path) -> str | None:
    """The version of Qualcomm's SDK that a library is from; None if it does not say it or cannot be read."""
    with suppress(OSError):
        return _version(file, is_library=True)
    return None


def stated_version(file: Path) -> str | None:
    """The version of Qualcomm's SDK that a library or a context binary is from; None if it does not say it.

    Raises:
        OSError: the file cannot be read.
    """
    return _version(file, is_library=False)


def _version(file: Path, *, is_library: bool) -> str | None:
    if file.stat().st_size == 0:
        return None
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = content.find(_STATED)  # five times as fast as a regular expression
        if at >= 0:
            match = _NUMBERS.match(content, at + len(_STATED))
            return None if match is None else match[0].decode()
        match = None if is_library else _BUILD.search(content)
        return None if match is None else match[1].decode()


def _candidates(on: Platform, environment: Mapping[str, str]) -> Iterator[LibraryPlace]:
    if chosen := environment.get(FOLDER_VARIABLE):
        yield LibraryPlace(Path(chosen), (Path(chosen),), FOLDER_VARIABLE)
    spec = util.find_spec(PACKAGE)
    if spec is not None and spec.origin is not None:
        for inner in _WHEEL_FOLDERS:
            folder = Path(spec.origin).parent / inner
            yield LibraryPlace(folder, (folder,), PACKAGE)
    for variable in SDK_VARIABLES:
        if root := environment.get(variable):
            skels = tuple(sorted(Path(root, "lib").glob("hexagon-v*/unsigned")))
            for target in _SDK_TARGETS.get((on.system, on.machine), ()):
                yield LibraryPlace(Path(root, "lib", target), skels, variable)
