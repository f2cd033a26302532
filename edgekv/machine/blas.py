"""Kernels of OpenBLAS that the processor can run.

numpy 1.26 brings OpenBLAS 0.3.23, which knows processors by their model numbers: on one that is newer it computes with
AVX2 or SSE alone, at half or a third of the speed. The variable must be set before numpy is imported.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from edgekv.machine.system import instructions

VARIABLE = "OPENBLAS_CORETYPE"

# Names in OpenBLAS, and the flags in /proc/cpuinfo of what their kernels execute; the first that fits.
_KERNELS = (
    ("SkylakeX", frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})),
    ("Haswell", frozenset({"avx2", "fma"})),
)


def kernels_for(cpuinfo: str) -> str | None:
    """The kernels for a processor, by the text of /proc/cpuinfo; None if it names neither AVX-512 nor AVX2."""
    return next((kernels for kernels, needed in _KERNELS if needed <= instructions(cpuinfo)), None)


def use_fastest_kernels(environment: MutableMapping[str, str] = os.environ) -> None:
    """Name the kernels in an environment, unless it names some, or numpy is 2 or later and knows the processor."""
    if VARIABLE in environment:
        return
    try:
        if not version("numpy").startswith("1."):
            return
        cpuinfo = Path("/proc/cpuinfo").read_text("ascii", "replace")
    except (PackageNotFoundError, OSError):
        return
    if kernels := kernels_for(cpuinfo):
        environment[VARIABLE] = kernels
