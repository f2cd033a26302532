"""Opening a bundle: nothing is used before its size and hash were seen to be those of the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from edgekv.bundle.consistency import check_consistency
from edgekv.bundle.manifest import FORMAT, MANIFEST, Manifest
from edgekv.bundle.readable import readable_json
from edgekv.errors import BundleError
from edgekv.spec import GraphRecord, PartRecord
from edgekv.spec.text import TOKENIZER, open_tokenizer
from edgekv.system import sha256_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_EXPORT_AGAIN = "Export the bundle again: edgekv export CHECKPOINT -o {folder} --force"
# What the runtime could pick up from a folder; notes that someone lays beside them harm nobody.
_KNOWN_SUFFIXES = frozenset({".onnx", ".data", ".bin", ".safetensors", ".tflite"})
_KNOWN_NAMES = frozenset({TOKENIZER})


@dataclass(frozen=True, slots=True)
class Bundle:
    """A verified bundle.

    Attributes:
        path: its folder, absolute.
        manifest: what it says about itself.
    """

    path: Path
    manifest: Manifest

    def graph_path(self, record: GraphRecord) -> Path:
        """The file of one of the manifest's graphs, of which all is in one part."""
        return self.path / record.file

    def part_path(self, record: PartRecord) -> Path:
        """The file of one part of a graph."""
        return self.path / record.file

    def require_whole(self, reader: str) -> None:
        """Refuse graphs of several parts, or without the embedding, on behalf of what runs a graph as one file.

        Raises:
            BundleError: the bundle has such graphs.
        """
        if not self.manifest.is_whole:
            parts = max(len(graph.parts) for graph in self.manifest.graphs)
            found = f"graphs of {parts} parts" if parts > 1 else "graphs that read embeddings"
            raise BundleError(
                f"bundle {self.path}: graphs",
                got=found,
                expected=f"graphs that are one file from token ids to logits, which {reader} runs",
                fix="Export it with --splits 1 --head last --embedding graph.",
            )

    def require_onnx(self, reader: str) -> None:
        """Refuse other graphs than ONNX graphs on behalf of what reads nothing else.

        Raises:
            BundleError: the bundle has other graphs.
        """
        if self.manifest.graph_format != "onnx":
            raise BundleError(
                f"bundle {self.path}: graphs",
                got=f"{self.manifest.graph_format} graphs",
                expected=f"onnx graphs, which {reader} reads",
                fix="Export it with --format onnx.",
            )

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint.

        Raises:
            BundleError: the bundle has none, or `tokenizers` cannot read it.
        """
        path = self.path / TOKENIZER
        fix = _again(self.path) if path.is_file() else "Give the prompt as token ids instead."
        return open_tokenizer(path, BundleError, fix)


def open_bundle(path: str | Path, verify: bool = True) -> Bundle:
    """Read a bundle's manifest and check its files against it.

    Args:
        path: the folder.
        verify: False leaves out the hashes of the files (their sizes are checked all the same).

    Raises:
        BundleError: the folder, its manifest or one of its files is missing, changed, unlisted or of another
            format version.
    """
    folder = Path(path).absolute()
    manifest = read_manifest(folder)
    _check_files(folder, manifest, hashes=verify)
    return Bundle(folder, manifest)


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of a bundle's folder, checked in itself; the other files are not looked at.

    Raises:
        BundleError: no folder, no manifest, broken JSON, another format version, a field of the wrong type or
            fields that contradict each other.
    """
    folder = Path(path)
    file = folder / MANIFEST
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing there"
        fix = "Make one with: edgekv export CHECKPOINT -o BUNDLE --device DEVICE"
        raise BundleError(f"bundle {folder}", got=found, expected="a bundle's folder", fix=fix)
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise BundleError(
            str(file), got=error.strerror, expected="the manifest of a bundle", fix=_again(folder)
        ) from None
    try:
        _check_format(folder, file, raw)
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.ValidationError as error:
        raise BundleError(str(file), got=error, expected=f"the fields of format {FORMAT}", fix=_again(folder)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BundleError(str(file), got=error, expected="whole JSON", fix=_again(folder)) from None

    def fail(field: str, found: object, wanted: object) -> NoReturn:
        raise BundleError(f"{file}: {field}", got=found, expected=wanted, fix=_again(folder))

    check_consistency(manifest, fail)
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into a folder, indented for readers."""
    (folder / MANIFEST).write_bytes(readable_json(manifest))


def _again(folder: Path) -> str:
    return _EXPORT_AGAIN.format(folder=folder)


class _Format(msgspec.Struct):
    format: int


def _check_format(folder: Path, file: Path, raw: bytes) -> None:
    """The version is read by itself first: a newer layout may differ in every other field."""
    version = msgspec.json.decode(raw, type=_Format).format
    if version > FORMAT:
        raise BundleError(
            f"{file}: format", got=version, expected=FORMAT, fix="Install a newer edgekv: pip install -U edgekv"
        )
    if version != FORMAT:
        raise BundleError(f"{file}: format", got=version, expected=FORMAT, fix=_again(folder))


def _check_files(folder: Path, manifest: Manifest, *, hashes: bool) -> None:
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            wanted = f"a file of {record.bytes} bytes"
            raise BundleError(str(path), got="no such file", expected=wanted, fix=_again(folder))
        if (size := path.stat().st_size) != record.bytes:
            found, wanted = f"{size} bytes", f"{record.bytes} bytes"
            raise BundleError(str(path), got=found, expected=wanted, fix=_again(folder))
        if hashes and (digest := sha256_of(path)) != record.sha256:
            found, wanted = f"sha256 {digest}", f"sha256 {record.sha256}"
            raise BundleError(str(path), got=found, expected=wanted, fix=_again(folder))
    for path in sorted(folder.iterdir()):  # folders within, such as `compiled`, have manifests of their own
        known = path.suffix in _KNOWN_SUFFIXES or path.name in _KNOWN_NAMES
        if known and path.name not in manifest.files:
            fix = "Move it out of the bundle."
            raise BundleError(str(path), got="a file that the manifest does not list", expected="listed files", fix=fix)
