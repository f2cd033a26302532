"""Qualcomm's Genie from the wheel onnxruntime-qnn, in the tested version."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from edgekv.errors import EngineError
from edgekv.qnn.vendor_libraries import Platform, package_place

PACKAGE = "onnxruntime-qnn"
TESTED = "2.7.0"
LIBRARY = "Genie"
_INSTALL = 'Install it: pip install "edgekv[htp]"'


def find_library() -> Path:
    """Genie's library of the tested version, from the wheel. Nothing is loaded.

    Names of graphs are replaced within binaries, and the library is called without headers. Both are known to work
    with this version only.

    Raises:
        EngineError: the package is missing, has another version, or has no Genie for this machine.
    """
    on = Platform.here()
    place = package_place(on)
    if place is None:
        raise EngineError("Genie", got=f"no package {PACKAGE}", expected=f"{PACKAGE} {TESTED}", fix=_INSTALL)
    if (version := metadata.version(PACKAGE)) != TESTED:
        raise EngineError("Genie", got=f"{PACKAGE} {version}", expected=f"the tested {TESTED}", fix=_INSTALL)
    if not place.has(LIBRARY, on):
        raise EngineError(
            "Genie",
            got=f"no {place.folder / on.library(LIBRARY)}",
            expected="a wheel of Qualcomm's that has it",
            fix="Run this on Linux, or on Windows.",
        )
    return place.folder / on.library(LIBRARY)
