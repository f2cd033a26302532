"""Finished context binaries, kept until all of a bundle are: large ones take minutes each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from devices import Device
from edgekv import qnn
from edgekv.bundle import CompiledBinary, FileRecord, atomic_directory, remove_directory
from edgekv.runtime import HtpOptions
from edgekv.system import link_or_copy, sha256_of
from exporters.htp.compile import COMPILER_DEFAULTS, Lint, Watch, compile_graphs, unwatched
from exporters.quantize.stages.keys import program_sha256

_RECORD = "binary.json"


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    binary: CompiledBinary
    files: dict[str, FileRecord]


class FinishedBinaries:
    """Compiles graphs of a bundle, or takes kept binaries."""

    def __init__(
        self, folder: Path, files: Mapping[str, FileRecord], *, resume: bool, lint: Lint | None = None
    ) -> None:
        """Prepare to compile.

        Args:
            folder: the cache folder.
            files: files of the bundle; a binary depends on all of them.
            resume: use kept binaries.
            lint: called with the float nodes of each compiled graph.
        """
        self._folder = folder
        self._sources = {name: file.sha256 for name, file in files.items()}
        self._resume = resume
        self._lint = lint
        self._kept: list[Path] = []

    def compile(
        self,
        device: Device,
        models: Mapping[str, Path],
        folder: Path,
        *,
        prefix: str = "",
        watch: Watch = unwatched,
        options: HtpOptions = COMPILER_DEFAULTS,
    ) -> CompiledBinary:
        """Like `exporters.htp.compile.compile_graphs`."""
        given = dict(options.provider_options)
        content = (program_sha256(), qnn.compiler(), device.soc, list(models), prefix, self._sources, given)
        kept = self._folder / hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:32]
        self._kept.append(kept)
        if self._resume and (found := _taken(kept, folder)) is not None:
            return found
        binary = compile_graphs(device, models, folder, prefix=prefix, watch=watch, lint=self._lint, options=options)
        with atomic_directory(kept, force=True, marker=_RECORD) as partial:
            files = {}
            for name in (binary.file, *binary.wrappers.values()):
                link_or_copy(folder / name, partial / name)
                files[name] = FileRecord(bytes=(folder / name).stat().st_size, sha256=sha256_of(folder / name))
            (partial / _RECORD).write_bytes(msgspec.json.encode(_Record(binary=binary, files=files)))
        return binary

    def remove(self) -> None:
        """Remove the kept binaries of this bundle."""
        for kept in self._kept:
            remove_directory(kept)


def _taken(kept: Path, folder: Path) -> CompiledBinary | None:
    """Copy the files of an undamaged kept binary into a folder; None if there is none."""
    try:
        record = msgspec.json.decode((kept / _RECORD).read_bytes(), type=_Record)
        if any(sha256_of(kept / name) != file.sha256 for name, file in record.files.items()):
            return None
        for name in record.files:
            link_or_copy(kept / name, folder / name)
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return record.binary
