"""What is pushed: a folder of Genie's, or a bundle for an app of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from devices import find
from edgekv.bundle import open_bundle
from edgekv.spec import identify
from exporters.targets.genie.config import CONFIG, ENCODER_BINARY, GENERATOR_NODE, SHARED_CONFIG
from exporters.targets.genie.folder import GENIE_MANIFEST, GenieFolder, open_genie_folder


@dataclass(frozen=True, slots=True)
class Payload:
    """Verified files for one chip.

    Attributes:
        path: their folder.
        soc: part number of the chip.
        arch: its HTP version.
        names: the files, relative to the folder.
        binaries: the context binaries among them.
        genie: the folder, if Genie runs it.
    """

    path: Path
    soc: str
    arch: int
    names: tuple[str, ...]
    binaries: tuple[str, ...]
    genie: GenieFolder | None = None

    @property
    def config(self) -> str:
        """The configuration for a phone: over shared weights, if the folder has such binaries."""
        return SHARED_CONFIG if SHARED_CONFIG in self.names else CONFIG


def open_payload(folder: Path) -> Payload:
    """Open a folder of `edgekv bundle genie`, or a bundle; every file is checked against its hash.

    Raises:
        BundleError: it is neither, or a file is missing or changed.
    """
    found = identify(folder)
    return _bundle(folder) if found is not None and found.kind == "bundle" else _genie(folder)


def _genie(path: Path) -> Payload:
    """The binaries of single graphs stay here if there is one of all: they are for Genie on x86."""
    folder = open_genie_folder(path)
    manifest = folder.manifest
    alone = {graph.file for graph in manifest.graphs} - set(manifest.shared)
    left = {*alone, CONFIG, GENERATOR_NODE} if manifest.shared else set[str]()
    names = [GENIE_MANIFEST, *(name for name in sorted(manifest.files) if name not in left)]
    binaries = [*(manifest.shared or sorted(alone)), *[ENCODER_BINARY] * bool(manifest.vision)]
    return Payload(folder.path, manifest.soc, manifest.arch, tuple(names), tuple(binaries), folder)


def _bundle(path: Path) -> Payload:
    bundle = open_bundle(path)
    device = find(bundle.manifest.device)
    files = sorted(file.relative_to(bundle.path).as_posix() for file in bundle.path.rglob("*") if file.is_file())
    prefix = f"compiled/{device.soc}/"
    names = [name for name in files if not name.startswith("compiled/") or name.startswith(prefix)]
    binaries = [name for name in names if name.startswith(prefix) and name.endswith(".bin")]
    return Payload(bundle.path, device.soc, device.arch, tuple(names), tuple(binaries))
