"""Context binaries of a bundle for one chip, written by `edgekv compile`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgekv.bundle.bundle import Bundle
from edgekv.bundle.manifest import MANIFEST
from edgekv.bundle.records import FileRecord
from edgekv.bundle.verified import FileHashes, file_hashes
from edgekv.errors import BundleError
from edgekv.machine.json_file import read_json
from edgekv.machine.system import sha256_of
from edgekv.spec import ExpertSteps

FOLDER, COMPILED = "compiled", "compiled.json"


class CompiledBinary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One context binary.

    Attributes:
        file: the binary.
        wrappers: ONNX files with an EPContext node, by the name of a part of a graph; ONNX Runtime loads the binary
            through them. A `.tflite` file contains its binary, and is also the wrapper.
        graphs: the number of graphs in the binary.
        optimization: level at which it was compiled; null for a `.tflite` file, whose plugin has none.
    """

    file: str
    wrappers: dict[str, str]
    graphs: int
    optimization: int | None


class CompiledManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`compiled.json`, beside the binaries of one chip.

    Attributes:
        soc: part number, as read from the binaries.
        soc_model: the QNN id of the target.
        arch: HTP version, as read from the binaries.
        vtcm_bytes: as read from the binaries.
        compiler: the package that compiled, with its version.
        bundle_sha256: hash of the bundle's manifest, so that binaries of another export are not used.
        binaries: those of the first part of all graphs, then of the second, and so on. For each part: one binary per
            graph, if requested, then one in which all graphs share their weights.
        floating_nodes: QNN nodes that run in float, empty unless they were allowed, and for `.tflite` files.
        files: size and hash of every file.
        expert_steps: of experts that decode graphs read as inputs: these graphs are compiled as
            `divided_at_routers` gives them; null if they are compiled as in the bundle.
    """

    soc: str
    soc_model: int
    arch: int
    vtcm_bytes: int
    compiler: str
    bundle_sha256: str
    binaries: list[CompiledBinary]
    floating_nodes: list[str]
    files: dict[str, FileRecord]
    expert_steps: ExpertSteps | None = None


@dataclass(frozen=True, slots=True)
class CompiledBinaries:
    """The binaries of one chip.

    Attributes:
        path: their folder.
        manifest: the content of `compiled.json`.
    """

    path: Path
    manifest: CompiledManifest

    def wrapper(self, part: str, *, is_shared: bool = False) -> Path | None:
        """The wrapper of the binary that contains only this part of a graph; None if there is none.

        Args:
            is_shared: of the binary in which all graphs share the weights of the part.

        Raises:
            BundleError: the wrapper or its binary was changed. A damaged binary may crash the process that loads it.
        """
        for binary in self.manifest.binaries:
            if (binary.graphs > 1) == is_shared and part in binary.wrappers:
                with file_hashes() as hashes:
                    for name in (binary.wrappers[part], binary.file):
                        self._check(name, hashes)
                return self.path / binary.wrappers[part]
        return None

    def _check(self, name: str, hashes: FileHashes) -> None:
        path, record = self.path / name, self.manifest.files.get(name)
        try:
            got = f"sha256 {hashes.sha256_of(path)}"
        except OSError as error:
            got = str(error.strerror)
        expected = "a file that its compiled.json lists" if record is None else f"sha256 {record.sha256}"
        if got != expected:
            fix = f"Compile again: edgekv compile BUNDLE --device {self.manifest.soc} --force"
            raise BundleError(str(path), got=got, expected=expected, fix=fix)


def open_compiled(bundle: Bundle, soc: str, compiler: str) -> CompiledBinaries | None:
    """The binaries that this compiler made from this export for a chip; None if there are none.

    Raises:
        BundleError: `compiled.json` is damaged.
    """
    if not (bundle.path / FOLDER / soc / COMPILED).exists():
        return None
    compiled = _read(bundle, soc)
    return compiled if compiled.manifest.compiler == compiler and _is_current(bundle, compiled) else None


def all_compiled(bundle: Bundle) -> list[CompiledBinaries]:
    """The binaries of this export for all chips, whichever compiler made them, by part number.

    Raises:
        BundleError: a `compiled.json` is damaged.
    """
    socs = sorted(path.parent.name for path in (bundle.path / FOLDER).glob(f"*/{COMPILED}"))
    return [compiled for soc in socs if _is_current(bundle, compiled := _read(bundle, soc))]


def _read(bundle: Bundle, soc: str) -> CompiledBinaries:
    folder = bundle.path / FOLDER / soc
    fix = f"Compile again: edgekv compile {bundle.path} --device {soc} --force"
    manifest = read_json(folder / COMPILED, CompiledManifest, expected="what edgekv compile wrote", fix=fix)
    return CompiledBinaries(folder, manifest)


def _is_current(bundle: Bundle, compiled: CompiledBinaries) -> bool:
    """Whether binaries were made from this export, for the chip that their folder is named after."""
    source = (compiled.manifest.soc, compiled.manifest.bundle_sha256)
    return source == (compiled.path.name, sha256_of(bundle.path / MANIFEST))
