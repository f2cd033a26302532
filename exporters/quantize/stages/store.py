"""The cache directory of stages."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from edgekv.bundle import remove_directory
from edgekv.errors import UsageError
from edgekv.system import CACHE_VARIABLE, cache_folder
from exporters.quantize.reference import Floats
from exporters.quantize.stages.stage import Stage
from quant import QuantizedWeight, Range


class StageStore:
    """Stages in a folder, by key."""

    def __init__(self, folder: Path) -> None:
        """Set the folder; it is created with the first stage."""
        self.folder = folder

    def find(self, key: str) -> Stage | None:
        """The stage of this key; None if it is missing or damaged."""
        return Stage.open(self._path(key))

    def write(
        self,
        key: str,
        matrices: Mapping[str, QuantizedWeight],
        ranges: Mapping[str, Range],
        hidden: Floats | None,
    ) -> Stage:
        """Keep a stage; see `Stage.write`."""
        return Stage.write(self._path(key), matrices, ranges, hidden)

    def remove(self, keys: Iterable[str]) -> None:
        """Remove these stages; missing ones are ignored."""
        for key in keys:
            remove_directory(self._path(key))

    def clear(self) -> None:
        """Remove all stages."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return sum(1 for path in self.folder.glob("[!.]*") if path.is_dir())

    @property
    def bytes(self) -> int:
        """Total size of all files."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def _path(self, key: str) -> Path:
        return self.folder / key[:32]


def stage_store(folder: Path | None = None) -> StageStore:
    """The stages in a cache directory; None for EDGEKV_CACHE_DIR or the user's cache directory.

    Raises:
        UsageError: it is no folder, or cannot be made.
    """
    folder = folder or cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--cache-dir {folder}",
            got=error.strerror,
            expected="a folder that can be written",
            fix=f"Give another one, or set {CACHE_VARIABLE}.",
        ) from None
    return StageStore(folder / "stages")
