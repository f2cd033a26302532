"""What a context binary says of itself: the chip that it is for, and its graphs."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from devices import Device
from edgekv.errors import EngineError
from edgekv.machine.system import MIB

_TARGET = re.compile(rb"soc_type=(\w+);arch=(\d+);[\x20-\x7e]*?vtcm_size=(\d+)")
_GRAPH = re.compile(rb"PICKLE/")


@dataclass(frozen=True, slots=True)
class BinaryTarget:
    """The chip that a context binary was compiled for.

    Attributes:
        soc: part number.
        arch: HTP version.
        vtcm_bytes: tightly coupled memory.
    """

    soc: str
    arch: int
    vtcm_bytes: int


def count_graphs(binary: Path) -> int:
    """The number of graphs in a context binary."""
    with _mapped(binary) as content:
        return sum(1 for _ in _GRAPH.finditer(content))


def read_target(binary: Path) -> BinaryTarget | None:
    """The chip that a context binary states; None if it states none."""
    with _mapped(binary) as content:
        match = _TARGET.search(content)
        return None if match is None else BinaryTarget(match[1].decode(), int(match[2]), int(match[3]))


@contextmanager
def _mapped(binary: Path) -> Iterator[mmap.mmap | bytes]:
    """The content of a file without reading it into memory: binaries are as large as the weights."""
    with binary.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content


def check_chip(binary: Path, device: Device, vtcm_mb: int | None = None) -> None:
    """Reject a binary that does not state this device as its target, with this VTCM; None for all of the device's."""
    stated = read_target(binary)
    expected = BinaryTarget(device.soc, device.arch, (vtcm_mb or device.vtcm_mb) * MIB)
    if stated != expected:
        raise EngineError(
            f"target of {binary.name}",
            got="no soc_type in the binary" if stated is None else _in_words(stated),
            expected=_in_words(expected),
            fix="The compiler did not take the target: use the tested version, `pip install edgekv[htp]`.",
        )


def _in_words(target: BinaryTarget) -> str:
    return f"{target.soc}, V{target.arch}, {target.vtcm_bytes // MIB} MiB VTCM"
