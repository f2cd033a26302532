"""Opening a bundle: no file is used before its size and hash are checked against the manifest."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgekv.bundle.manifest import Manifest
from edgekv.bundle.manifest_file import export_again, read_manifest
from edgekv.bundle.verified import file_hashes
from edgekv.bundle.weights import BundleWeights, EmbeddingTable
from edgekv.errors import BundleError
from edgekv.machine.graph_file import GRAPH_SUFFIX
from edgekv.machine.steps import step
from edgekv.spec import EMBEDDING_COLUMNS, LAYER_INPUTS, LAYER_INPUTS_PORT, GraphRecord, PartRecord, table_key
from edgekv.spec.text import TOKENIZER, open_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Files that an engine could load; other files, such as notes and unpacked graphs, are ignored.
_KNOWN_ENDS = (GRAPH_SUFFIX, ".data", ".bin", ".safetensors", ".tflite", TOKENIZER)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A verified bundle.

    Attributes:
        path: its folder, absolute.
        manifest: the content of its `manifest.json`.
    """

    path: Path
    manifest: Manifest

    def graph_path(self, record: GraphRecord) -> Path:
        """The file of a graph that has one part."""
        return self.path / record.file

    def part_path(self, record: PartRecord) -> Path:
        """The file of one part of a graph."""
        return self.path / record.file

    def weights(self) -> BundleWeights:
        """The weights of its ONNX graphs."""
        return BundleWeights(self.path, self.manifest.weights)

    def embeddings(self) -> EmbeddingTable:
        """The table of embeddings of its ONNX graphs."""
        manifest = self.manifest
        weights, columns = self.weights(), None
        integers, scales = weights.by_rows(table_key(manifest.model))
        if (place := manifest.weights.tensors.get(EMBEDDING_COLUMNS)) is not None:
            factors = place.encoding.dequantize(weights.tensor(EMBEDDING_COLUMNS))
            columns = factors, manifest.encodings["embedding.columns"]
        return EmbeddingTable(integers, scales, manifest.encodings["embedding"], columns)

    def layer_inputs(self) -> EmbeddingTable | None:
        """The table of what layers read of each token, `[V, layers * P]`; None if they read nothing."""
        if not self.manifest.model.layer_inputs:
            return None
        return EmbeddingTable(*self.weights().by_rows(LAYER_INPUTS), self.manifest.encodings[LAYER_INPUTS_PORT])

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint.

        Raises:
            BundleError: the bundle has none, or `tokenizers` cannot read it.
        """
        path = self.path / TOKENIZER
        fix = export_again(self.path) if path.is_file() else "Give the prompt as token ids instead."
        return open_tokenizer(path, BundleError, fix)


def open_bundle(path: str | Path, verify: bool = True) -> Bundle:
    """Read a bundle's manifest and check its files against it.

    Hashes of files that did not change since they were last verified are taken from the user's cache folder; see
    `rehashing`.

    Args:
        verify: False skips the hashes of the files; their sizes are checked in any case.

    Raises:
        BundleError: the folder, its manifest or one of its files is missing, changed, unlisted, or of an unknown format
            version.
    """
    folder = Path(path).absolute()
    manifest = read_manifest(folder)
    _check_sizes(folder, manifest)
    _check_unlisted(folder, manifest)
    if verify:
        with step(f"verify {len(manifest.files)} files of {folder.name}"):
            _check_hashes(folder, manifest)
    return Bundle(folder, manifest)


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    for name, record in manifest.files.items():
        path = folder / name
        expected = f"{record.bytes} bytes"
        try:
            status = path.stat()
        except OSError:
            got = "no such file"
            raise BundleError(str(path), got=got, expected=f"a file of {expected}", fix=export_again(folder)) from None
        if not stat.S_ISREG(status.st_mode):
            got = "no regular file"
            raise BundleError(str(path), got=got, expected=f"a file of {expected}", fix=export_again(folder))
        if status.st_size != record.bytes:
            got = f"{status.st_size} bytes"
            raise BundleError(str(path), got=got, expected=expected, fix=export_again(folder))


def _check_unlisted(folder: Path, manifest: Manifest) -> None:
    for path in sorted(folder.iterdir()):  # subfolders such as `compiled` have their own manifests
        if path.name.endswith(_KNOWN_ENDS) and path.name not in manifest.files:
            fix = "Move it out of the bundle."
            raise BundleError(str(path), got="a file that the manifest does not list", expected="listed files", fix=fix)


def _check_hashes(folder: Path, manifest: Manifest) -> None:
    with file_hashes() as hashes:
        for name, record in manifest.files.items():
            if (digest := hashes.sha256_of(folder / name)) != record.sha256:
                got, expected = f"sha256 {digest}", f"sha256 {record.sha256}"
                raise BundleError(str(folder / name), got=got, expected=expected, fix=export_again(folder))
