"""A kit: a folder whose `kit.json` lists every file with its hash. It is verified before anything of it runs."""

from __future__ import annotations

import gzip
import lzma
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from devices.report import Prediction
from edgekv.bundle import Bundle, FileRecord, is_plain_path, open_bundle
from edgekv.errors import BundleError
from edgekv.machine.decoding import convert
from edgekv.machine.json_file import readable_json
from edgekv.machine.scratch import scratch_folder
from edgekv.machine.system import MIB, link_or_copy, read_file, sha256_of
from edgekv.machine.tensor_file import TensorFileError, decode_tensors, encode_tensors

KIT = "kit.json"
FORMAT = 1
"""Incremented when a field is changed or removed."""
LIMIT_BYTES = 60_000_000
"""Of a kit without a bundle of the user's."""

PACKED = ".gz"
"""Ends the name of a compressed file."""

PartKind = Literal["operation", "family", "vision"]
PART_KINDS: tuple[PartKind, ...] = ("operation", "family", "vision")

_MAX_MANIFEST_BYTES = 16 * MIB
_MAX_FILE_BYTES = 256 * MIB
_MAX_BINARIES_BYTES = 2048 * MIB
_SOLID = ".xz"
_AGAIN = "Copy the kit again, or make a new one: edgekv conformance make"

Arrays = dict[str, NDArray[np.generic]]


class KitGraph(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled graph, with inputs and the integers that it must give.

    Attributes:
        name: of the graph: that of its part, or of a layer.
        wrapper: the ONNX file that names the binary.
        binary: the context binary, compressed if its name ends with `.gz`.
        cases: a safetensors file, compressed likewise: `in.CASE.NAME` and `out.CASE.NAME`.
        count: number of cases; each has other inputs.
        results: names of the outputs, in the order in which they are computed.
    """

    name: str
    wrapper: str
    binary: str
    cases: str
    count: int
    results: list[str]


class KitPart(msgspec.Struct, frozen=True, kw_only=True):
    """A graph as it ships, and what finds the operation if it differs.

    Attributes:
        name: such as `operation/softmax` or `family/llama`.
        kind: what it is an example of.
        graph: the graph.
        layers: its layers, each a graph whose outputs are all results; they are run if the graph differs.
    """

    name: str
    kind: PartKind
    graph: KitGraph
    layers: list[KitGraph] = []


class KitModel(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle in the kit, with what it decodes.

    Attributes:
        name: of the model.
        folder: of the bundle.
        golden: a safetensors file: `prompt`, `tokens`, `logits` `[tokens, V]`, and `rows.NAME` of each cache tensor.
        weights_bytes: weights that a pass of one token reads.
        binaries: a compressed safetensors file of the bundle's compiled files, as bytes; empty if they are in its
            folder.
    """

    name: str
    folder: str
    golden: str
    weights_bytes: int
    binaries: str = ""


class KitManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`kit.json`.

    Attributes:
        format: version of this layout.
        producer: the program and version that made the kit.
        soc: part number of the chip.
        arch: its HTP version.
        compiler: the package that compiled and whose emulator computed the expected integers, with its version.
        qairt: version of Qualcomm's libraries that wrote the binaries; empty if they do not say it.
        parts: graphs.
        models: bundles; the first is the embedded model.
        predictions: of the models' graphs.
        left_out: parts that the chip cannot run, and why.
        files: every other file.
        seal: SHA-256 of all other fields.
    """

    format: int
    producer: str
    soc: str
    arch: int
    compiler: str
    qairt: str
    parts: list[KitPart]
    models: list[KitModel]
    predictions: list[Prediction]
    left_out: dict[str, str]
    files: dict[str, FileRecord]
    seal: str = ""

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files.values())


@dataclass(frozen=True, slots=True)
class Kit:
    """A verified kit.

    Attributes:
        path: its folder, absolute.
        manifest: the content of `kit.json`.
    """

    path: Path
    manifest: KitManifest

    @property
    def part_names(self) -> list[str]:
        """Of its graphs."""
        return [part.name for part in self.manifest.parts]


def is_named(part: str, name: str) -> bool:
    """Whether a name is that of a part, such as `family/llama`, or of the group that it is in, such as `family`."""
    return part == name or part.startswith(f"{name}/")


def seal_kit(manifest: KitManifest) -> bytes:
    """The content of `kit.json`, with its seal."""
    return readable_json(msgspec.structs.replace(manifest, seal=_seal(manifest)))


def _seal(manifest: KitManifest) -> str:
    return sha256(msgspec.json.encode(msgspec.structs.replace(manifest, seal=""))).hexdigest()


def open_kit(path: Path) -> Kit:
    """Read a kit's manifest, and check all of its files against it.

    Raises:
        BundleError: there is no kit, or it or one of its files was changed.
    """
    folder = path.absolute()
    try:
        raw = read_file(folder / KIT, _MAX_MANIFEST_BYTES)
    except OSError as error:
        got = f"no {KIT}" if isinstance(error, FileNotFoundError) else error.strerror
        raise BundleError(str(path), got=got, expected="a kit of edgekv conformance make", fix=_AGAIN) from None
    manifest = _decoded(raw, folder / KIT)
    for name, record in manifest.files.items():
        if not is_plain_path(name):
            raise BundleError(f"{path}: files", got=repr(name), expected="paths within the kit", fix=_AGAIN)
        file = folder / name
        try:
            got = f"{file.stat().st_size} bytes"
            if file.stat().st_size == record.bytes:
                digest = sha256_of(file)
                got = "another content" if digest != record.sha256 else ""
        except OSError as error:
            got = str(error.strerror)
        if got:
            expected = f"the {record.bytes} bytes that {KIT} lists"
            raise BundleError(f"{path}: {name}", got=got, expected=expected, fix=_AGAIN)
    return Kit(folder, manifest)


def _decoded(raw: bytes, file: Path) -> KitManifest:
    def refused(field: str, got: object, expected: str) -> BundleError:
        return BundleError(f"{file}{field}", got=got, expected=expected, fix=_AGAIN)

    try:
        record = msgspec.json.decode(raw)
        version = record.get("format") if isinstance(record, dict) else None
        if version != FORMAT:
            raise refused(": format", version, f"{FORMAT}, which this edgekv reads")
        manifest = convert(record, KitManifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise refused("", str(error) or "values nested too deeply", "what edgekv conformance make wrote") from None
    if manifest.seal != _seal(manifest):
        raise refused(": seal", manifest.seal or "none", "the SHA-256 of the content: it was changed")
    used = {file for part in manifest.parts for graph in (part.graph, *part.layers) for file in graph_files(graph)}
    used |= {file for model in manifest.models for file in (model.golden, model.binaries) if file}
    if missing := sorted(used - manifest.files.keys()):
        raise refused(": files", f"no {missing[0]}", "all files of its graphs")
    return manifest


def graph_files(graph: KitGraph) -> tuple[str, str, str]:
    """The files of a graph."""
    return graph.wrapper, graph.binary, graph.cases


def pack(file: Path) -> Path:
    """Replace a file by a compressed one, the same bytes each time: binaries of small graphs are half as large."""
    compressed = file.with_name(file.name + PACKED)
    compressed.write_bytes(gzip.compress(file.read_bytes(), mtime=0))
    file.unlink()
    return compressed


def unpack(file: Path, folder: Path) -> Path:
    """A copy of a file of a kit in a folder, without compression.

    Raises:
        BundleError: it is damaged.
    """
    target = folder / file.name.removesuffix(PACKED)
    target.write_bytes(_content(file))
    return target


def pack_binaries(bundle: Path, file: Path) -> None:
    """Move the compiled files of a bundle into one compressed file, which stores the weights of all graphs once."""
    folder = bundle / "compiled"
    paths = {path.relative_to(bundle).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    arrays: Arrays = {name: np.fromfile(path, np.uint8) for name, path in paths.items()}
    file.write_bytes(lzma.compress(encode_tensors(arrays)))
    shutil.rmtree(folder)


def unpack_binaries(file: Path, folder: Path) -> list[str]:
    """Write the compiled files of a bundle into a folder; their names there.

    Raises:
        BundleError: the file is damaged.
    """
    arrays = read_arrays(file)
    for name, content in arrays.items():
        if not is_plain_path(name):
            raise BundleError(file.name, got=repr(name), expected="paths within the bundle", fix=_AGAIN)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.tobytes())
    return [*arrays]


@contextmanager
def opened_model(kit: Path, model: KitModel) -> Iterator[Bundle]:
    """The bundle of a kit's model, with its binaries.

    Raises:
        BundleError: a file of it is damaged.
    """
    folder = kit / model.folder
    if not model.binaries:
        yield open_bundle(folder, verify=False)
        return
    with scratch_folder("model") as scratch:
        for path in sorted(folder.rglob("*")):
            target = scratch / path.relative_to(folder)
            if path.is_dir():
                target.mkdir()
            else:
                link_or_copy(path, target)
        unpack_binaries(kit / model.binaries, scratch)
        yield open_bundle(scratch, verify=False)


def _content(file: Path) -> bytes:
    limit_bytes = _MAX_BINARIES_BYTES if file.suffix == _SOLID else _MAX_FILE_BYTES
    try:
        if file.suffix not in (PACKED, _SOLID):
            return read_file(file, limit_bytes)
        with gzip.open(file) if file.suffix == PACKED else lzma.open(file) as packed:
            content = packed.read(limit_bytes + 1)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise BundleError(file.name, got=str(error), expected="a file of the kit", fix=_AGAIN) from None
    if len(content) > limit_bytes:
        expected = f"at most {limit_bytes} bytes"
        raise BundleError(file.name, got="more when it is unpacked", expected=expected, fix=_AGAIN)
    return content


def read_arrays(file: Path) -> Arrays:
    """The arrays of a safetensors file of a kit.

    Raises:
        BundleError: it is damaged.
    """
    try:
        return dict(decode_tensors(_content(file)).arrays)
    except TensorFileError as error:
        raise BundleError(file.name, got=str(error), expected="arrays", fix=_AGAIN) from None
