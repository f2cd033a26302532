"""What `edgekv compile` leaves in a bundle: the context binaries of one chip, and how they are found again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgekv.bundle.bundle import Bundle
from edgekv.bundle.manifest import MANIFEST, FileRecord
from edgekv.errors import BundleError
from edgekv.system import sha256_of

COMPILED = "compiled.json"


class CompiledBinary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One context binary and what it says of itself.

    Attributes:
        file: the binary.
        wrappers: ONNX files with an EPContext node, by the name of a part of a graph; ONNX Runtime loads the binary
            through them. A `.tflite` file holds its binary, and wraps itself.
        graphs: how many graphs the binary holds.
    """

    file: str
    wrappers: dict[str, str]
    graphs: int


class CompiledManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`compiled.json`, beside the binaries of one chip.

    Attributes:
        soc: part number, as read from the binaries.
        soc_model: the QNN id that was asked for.
        arch: HTP version, as read from the binaries.
        vtcm_bytes: as read from the binaries.
        compiler: the package that compiled, with its version.
        bundle_sha256: hash of the bundle's manifest: binaries of another export are not mistaken for these.
        binaries: of the first part of all graphs, then of the second, and so on. For each, one binary for each graph,
            if these were asked for, then one for all graphs with shared weights.
        files: size and hash of every file.
    """

    soc: str
    soc_model: int
    arch: int
    vtcm_bytes: int
    compiler: str
    bundle_sha256: str
    binaries: list[CompiledBinary]
    files: dict[str, FileRecord]


@dataclass(frozen=True, slots=True)
class Compiled:
    """The binaries of one chip.

    Attributes:
        path: their folder.
        manifest: what it says about itself.
    """

    path: Path
    manifest: CompiledManifest

    def wrapper(self, part: str) -> Path | None:
        """The wrapper of the binary that holds this part of a graph alone; None if there is none.

        Raises:
            BundleError: the wrapper or its binary was changed: a damaged binary may crash the process that loads it.
        """
        for binary in self.manifest.binaries:
            if binary.graphs == 1 and part in binary.wrappers:
                for name in (binary.wrappers[part], binary.file):
                    self._check(name)
                return self.path / binary.wrappers[part]
        return None

    def _check(self, name: str) -> None:
        path, record = self.path / name, self.manifest.files.get(name)
        digest = sha256_of(path) if path.is_file() else None
        if record is None or digest != record.sha256:
            raise BundleError(
                str(path),
                got="no such file" if digest is None else f"sha256 {digest}",
                expected="a file that its compiled.json lists" if record is None else f"sha256 {record.sha256}",
                fix=f"Compile again: edgekv compile BUNDLE --device {self.manifest.soc} --force",
            )


def open_compiled(bundle: Bundle, soc: str, compiler: str) -> Compiled | None:
    """The binaries that this compiler made of this very export for a chip; None if there are none.

    Raises:
        BundleError: `compiled.json` is damaged.
    """
    folder = bundle.path / "compiled" / soc
    try:
        raw = (folder / COMPILED).read_bytes()
    except FileNotFoundError:
        return None
    try:
        manifest = msgspec.json.decode(raw, type=CompiledManifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fix = f"Compile again: edgekv compile {bundle.path} --device {soc} --force"
        raise BundleError(str(folder / COMPILED), got=error, expected="what edgekv compile wrote", fix=fix) from None
    made_of = (manifest.soc, manifest.compiler, manifest.bundle_sha256)
    return Compiled(folder, manifest) if made_of == (soc, compiler, sha256_of(bundle.path / MANIFEST)) else None
