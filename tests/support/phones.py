"""A phone for `edgekv push` and `edgekv run`: the program adb in front of a folder, and an SDK."""

from __future__ import annotations

import marshal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.exports import ROOT

VERSION = "2.51.0"
PROPERTIES = {
    "ro.soc.model": "SM8650",
    "ro.product.model": "SM-S928B",
    "ro.product.cpu.abi": "arm64-v8a",
    "ro.build.version.release": "15",
}


class Phone:
    """A phone that is a folder; see `tests/support/adb_client.py`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.folder = folder
        self.storage = folder / "root/data/local/tmp"
        self.storage.mkdir(parents=True)
        (folder / "tools/platform-tools").mkdir(parents=True)
        (folder / "bin").mkdir()
        adb = folder / "tools/platform-tools/adb"
        _program(adb, f'exec {sys.executable} -SE {ROOT / "tests/support/adb_client.py"} "$@"')
        _program(folder / "bin/getprop", 'cat "$ADB_PHONE/properties/$1"; echo')
        _program(folder / "bin/df", 'echo Filesystem; echo /dev/x 9 9 $(cat "$ADB_PHONE/properties/free_kib") 9% /data')
        self.set(**({"states": {"R5CX": "device"}, "properties": PROPERTIES, "free_kib": 1 << 20} | settings))
        monkeypatch.setenv("ADB_PHONE", str(folder))
        monkeypatch.setenv("ANDROID_HOME", str(folder / "tools"))

    def set(self, **settings: Any) -> None:
        """Change what the phone is; None removes a setting. The connection is as new."""
        path = self.folder / "settings"
        held = marshal.loads(path.read_bytes()) if path.exists() else {}
        held = {name: value for name, value in (held | settings).items() if value is not None}
        path.write_bytes(marshal.dumps(held))
        (self.folder / "properties").mkdir(exist_ok=True)
        for name, value in (held["properties"] | {"free_kib": held["free_kib"]}).items():
            (self.folder / "properties" / name).write_text(str(value))
        for name in ("lost", "pushes"):
            (self.folder / name).unlink(missing_ok=True)

    @property
    def pushes(self) -> int:
        """How many files were copied since `set`."""
        path = self.folder / "pushes"
        return int(path.read_text()) if path.exists() else 0

    def files(self) -> set[str]:
        """All files in the phone's storage."""
        return {str(path.relative_to(self.storage)) for path in self.storage.rglob("*") if path.is_file()}


def write_sdk(folder: Path, runner: str, *, arch: int = 75, version: str = VERSION, **versions: str) -> Path:
    """An SDK for Android whose libraries are their version alone.

    Args:
        folder: where.
        runner: what its programs do, a shell script.
        arch: the HTP whose skel it has.
        version: of the libraries.
        versions: other versions, by the libraries' names without `lib` and `.so`.
    """
    names = ("Genie", "QnnSystem", "QnnHtp", "QnnHtpNetRunExtensions", f"QnnHtpV{arch}Stub")
    places = {name: folder / f"lib/aarch64-android/lib{name}.so" for name in names}
    places[f"QnnHtpV{arch}Skel"] = folder / f"lib/hexagon-v{arch}/unsigned/libQnnHtpV{arch}Skel.so"
    for name, path in places.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x7fELF" + f"v{versions.get(name, version)}.260929181845".encode())
    (folder / "bin/aarch64-android").mkdir(parents=True)
    for name in ("genie-t2t-run", "genie-app", "qnn-net-run"):
        _program(folder / "bin/aarch64-android" / name, runner)
    return folder


def _program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
