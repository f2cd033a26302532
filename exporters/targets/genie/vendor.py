"""Qualcomm's Genie from the wheel onnxruntime-qnn, in the tested version."""

from __future__ import annotations

from importlib import metadata, util
from pathlib import Path

from edgekv.errors import EngineError

PACKAGE = "onnxruntime-qnn"
TESTED = "2.7.0"
LIBRARY = "libGenie.so"
_INSTALL = 'Install it: pip install "edgekv[htp]"'


def find_library() -> Path:
    """libGenie.so of the tested version. Nothing is loaded.

    Names of graphs are replaced within binaries, and the library is called without headers. Both are known to work
    with this version only.

    Raises:
        EngineError: the package is missing, has another version, or has no Genie for this machine.
    """
    spec = util.find_spec("onnxruntime_qnn")
    if spec is None or spec.origin is None:
        raise EngineError("Genie", got=f"no package {PACKAGE}", expected=f"{PACKAGE} {TESTED}", fix=_INSTALL)
    if (version := metadata.version(PACKAGE)) != TESTED:
        raise EngineError("Genie", got=f"{PACKAGE} {version}", expected=f"the tested {TESTED}", fix=_INSTALL)
    path = Path(spec.origin).parent / LIBRARY
    if not path.is_file():
        raise EngineError(
            "Genie", got=f"no {path}", expected="Qualcomm's wheel for Linux", fix="Run this on Linux x86-64."
        )
    return path
