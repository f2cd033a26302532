"""What a phone is, as it says itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from shlex import quote

from devices import Device, UnknownDeviceError, find
from edgekv.errors import EngineError, UsageError
from exporters.targets.android.adb import Adb

_ABI = "arm64-v8a"
_PROPERTIES = ("ro.soc.model", "ro.product.model", "ro.product.cpu.abi", "ro.build.version.release")
_SHARED = ("/sdcard", "/storage", "/mnt/sdcard")
"""Android mounts these so that no program starts from them."""


@dataclass(frozen=True, slots=True)
class Phone:
    """A connected phone.

    Attributes:
        soc: the chip's part number as the phone states it (`ro.soc.model`); empty before Android 12.
        name: the product's name.
        abi: its first instruction set.
        android: its version of Android.
    """

    soc: str
    name: str
    abi: str
    android: str

    @classmethod
    def read(cls, adb: Adb) -> Phone:
        """Ask the phone.

        Raises:
            EngineError: it does not answer.
        """
        command = "; ".join(f"getprop {name}" for name in _PROPERTIES)
        lines = [line.strip() for line in adb.read(command, "getprop").splitlines()]
        soc, name, abi, android = (*lines, "", "", "", "")[:4]
        return cls(soc, name, abi, android)

    def chip(self, named: str | None) -> Device:
        """The chip in edgekv's catalogue.

        Args:
            named: what the user says it is, for phones that do not say it.

        Raises:
            EngineError: the phone has no 64-bit Arm system, or names no chip, or one that edgekv does not know.
        """
        if self.abi != _ABI:
            raise EngineError(
                self.name, got=self.abi or "no ABI", expected=_ABI, fix="Use a phone with 64-bit Android."
            )
        if not self.soc and named is None:
            fix = "Say which it is: --chip SM8650"
            raise EngineError(self.name, got="no name of its chip", expected="ro.soc.model", fix=fix)
        said = named or self.soc
        try:
            return find(said)
        except UnknownDeviceError as error:
            try:
                return find(said.split("-")[0])  # SM8650-AC is an SM8650
            except UnknownDeviceError:
                pass
            expected = "a chip that edgekv knows"
            raise EngineError(f"{self.name}: chip", got=error.got, expected=expected, fix=error.fix) from None


def check_chip(chip: Device, soc: str, arch: int, what: str) -> None:
    """Check that context binaries are for this chip.

    Raises:
        EngineError: they are for another one.
    """
    if chip.soc != soc:
        raise EngineError(
            what,
            got=f"binaries for {soc} (HTP V{arch})",
            expected=f"binaries for the phone's {chip.soc} (HTP V{chip.arch})",
            fix=f"Export and compile for it: --device {chip.soc}",
        )


def check_folder(folder: str) -> None:
    """Check a folder of the phone before anything is copied to it.

    Raises:
        UsageError: it is no absolute path, or on storage where no program may start.
    """
    fix = "Use a folder below /data/local/tmp."
    if not folder.startswith("/") or ".." in folder.split("/") or not re.fullmatch(r"[\w./+@=-]+", folder):
        raise UsageError("--to", got=repr(folder), expected="an absolute path of letters, digits and ._-+@=", fix=fix)
    if any(folder == each or folder.startswith(f"{each}/") for each in _SHARED):
        raise UsageError("--to", got=folder, expected="storage from which programs may start", fix=fix)


def free_bytes(adb: Adb, folder: str) -> int:
    """Free bytes of the file system of a folder that exists.

    Raises:
        EngineError: the phone does not say.
    """
    output = adb.read(f"df -k {quote(folder)}", "df")
    fields = output.splitlines()[-1].split() if output.strip() else []
    if len(fields) < 4 or not fields[-3].isdigit():
        raise EngineError(
            "df", got=output.strip()[-80:], expected="a line with free blocks", fix="Check: adb shell df -k"
        )
    return int(fields[-3]) * 1024
