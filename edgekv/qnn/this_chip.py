"""The chip of this machine, as its system states it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from devices import Device, UnknownDeviceError, find
from edgekv.qnn.vendor_libraries import Platform

# Linux: the attribute `machine` of Documentation/ABI/testing/sysfs-devices-soc, which drivers/soc/qcom/socinfo.c fills
# with the part number, and the root node's `compatible`, such as `qcom,qcs6490-rb3gen2`, `qcom,qcm6490`.
_STATED = "sys/devices/soc0/machine"
_COMPATIBLE = "proc/device-tree/compatible"
# Windows: `Snapdragon(R) X Elite - X1E80100 - Qualcomm(R) Oryon(TM) CPU`.
_PROCESSOR = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"


def find_chip(on: Platform, root: Path = Path("/")) -> Device | None:
    """The chip whose HTP a process here reaches; None if it has none, or does not say it, or is not in the catalogue.

    Args:
        on: this platform.
        root: of the file system, on Linux and Android.
    """
    if not on.has_npu:
        return None
    for name in _processor_names() if on.system == "windows" else _file_names(root):
        with suppress(UnknownDeviceError):
            return find(name)
    return None


def _file_names(root: Path) -> Iterator[str]:
    with suppress(OSError):
        yield (root / _STATED).read_text(errors="replace").strip()
    with suppress(OSError):
        text = (root / _COMPATIBLE).read_text(errors="replace")
        yield from re.findall(r"qcom,([\w-]+)", text)


def _processor_names() -> list[str]:
    import winreg

    with suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _PROCESSOR) as key:  # type: ignore[attr-defined,unused-ignore]
        text = str(winreg.QueryValueEx(key, "ProcessorNameString")[0])  # type: ignore[attr-defined,unused-ignore]
        return [part.strip() for part in text.split(" - ")]
    return []
