"""Refusing a folder that another command wrote, by what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from edgekv.errors import BundleError
from edgekv.spec import identify

Runtime = Literal["genie", "genai"]


def expect_folder_for(runtime: Runtime, folder: Path) -> None:
    """Check that a folder is not known to be something else than what `edgekv bundle RUNTIME` writes.

    Raises:
        BundleError: it is a bundle, a checkpoint, or a folder for another runtime; the fix says what to run.
    """
    try:
        found = identify(folder)
    except OSError:  # reading the folder reports it
        return
    if found is None or found.kind == runtime:
        return
    fixes = {
        "bundle": f"Write the folder first: edgekv bundle {runtime} {folder} -o DIR",
        "checkpoint": f"Export it: edgekv export {folder} -o BUNDLE --device DEVICE"
        f"; then run: edgekv bundle {runtime} BUNDLE -o DIR",
        "genie": f"Run it with: edgekv genie run {folder} --prompt TEXT",
        "genai": f"Run it with: edgekv genai run {folder} --prompt TEXT",
    }
    raise BundleError(
        str(folder),
        got=found.what,
        expected=f"a folder that edgekv bundle {runtime} wrote",
        fix=fixes.get(found.kind, found.as_bundle.format(path=folder)),
    )
