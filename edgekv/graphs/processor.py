"""What this machine's processors are good for."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from edgekv.machine.system import instructions

_ARM = ("aarch64", "arm64")


def is_arm() -> bool:
    """Whether this machine's processors are of Arm's 64-bit architecture."""
    return platform.machine().lower() in _ARM


@lru_cache(maxsize=1)
def multiplies_integers() -> bool:
    """Whether ONNX Runtime multiplies uint8 by int8 exactly, and faster than floats.

    True for Arm64, and for x86 with VNNI. Without VNNI its sums of 16 bits saturate. False if the system does not tell.
    """
    if is_arm():
        return True
    try:
        return "_vnni" in Path("/proc/cpuinfo").read_text("ascii", "replace")
    except OSError:
        return False


@lru_cache(maxsize=1)
def processor() -> str:
    """What kernels depend on: the architecture and, if the system tells them, the instructions."""
    known = frozenset[str]()
    with suppress(OSError):
        known = instructions(Path("/proc/cpuinfo").read_text("ascii", "replace"))
    return " ".join([platform.machine(), *sorted(known)])


def processors() -> int:
    """How many processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows
        return os.cpu_count() or 1
