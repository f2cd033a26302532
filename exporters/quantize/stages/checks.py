"""Results of the HTP float check, kept for --resume: checking a large graph takes minutes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from devices import Device
from edgekv import qnn
from edgekv.bundle import FileRecord, atomic_file
from exporters.htp.check import floating_nodes
from exporters.quantize.stages.keys import program_sha256

_SUFFIX = ".json"


class Checks:
    """Checks the graphs of one export and keeps the results until the bundle is complete."""

    def __init__(self, folder: Path, device: Device, files: Mapping[str, FileRecord], *, resume: bool) -> None:
        """Prepare to check graphs.

        Args:
            folder: the cache folder.
            device: the target.
            files: files of the bundle; a result depends on all of them.
            resume: use kept results.
        """
        self._folder = folder
        self._device = device
        self._files = files
        self._resume = resume
        self._kept: set[Path] = set()

    def floating_nodes(self, model: Path) -> list[str]:
        """See `exporters.htp.check.floating_nodes`."""
        path = self._path(model.name)
        known = self._resume or path in self._kept
        self._kept.add(path)
        if known:
            try:
                return msgspec.json.decode(path.read_bytes(), type=list[str])
            except (OSError, msgspec.DecodeError):
                pass
        found = floating_nodes([model], self._device)
        self.keep(model.name, found)
        return found

    def keep(self, name: str, found: list[str]) -> None:
        """Keep the result for a file."""
        path = self._path(name)
        self._kept.add(path)
        self._folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as partial:
            partial.write_bytes(msgspec.json.encode(found))

    def remove(self) -> None:
        """Remove the kept results of this export."""
        for path in self._kept:
            path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._key(name)}{_SUFFIX}"

    def _key(self, name: str) -> str:
        hashes = {file: record.sha256 for file, record in self._files.items() if file == name or ".onnx" not in file}
        content = (program_sha256(), qnn.compiler(), self._device.soc, name, hashes)
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:32]
