"""A graph as AI Hub accepts it: a zipped folder of one .onnx file and one .data file with its weights."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import onnx

from edgekv.bundle import Bundle, GraphRecord, atomic_file
from edgekv.errors import BundleError
from edgekv.system import sha256_of
from exporters.targets.aihub.options import graph_name

_BLOCK_BYTES = 1 << 20
_ALIGNMENT_BYTES = 64
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)  # the earliest date of a zip: the same graph always gives the same file


@dataclass(frozen=True, slots=True)
class PackedGraph:
    """An upload on disk.

    Attributes:
        path: the zip file.
        sha256: of the zip file.
    """

    path: Path
    sha256: str


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of a shard, and where they go in the .data file."""

    file: str
    source: int
    target: int
    length: int


def pack_graph(bundle: Bundle, graph: GraphRecord, folder: Path) -> PackedGraph:
    """Write `<graph name>.onnx.zip` into a folder, complete or not at all.

    The weights are copied in blocks of 1 MiB, because a graph may be larger than the memory. They are stored
    uncompressed: integer weights hardly shrink.

    Raises:
        BundleError: a weight of the graph is not in the bundle.
    """
    name = graph_name(graph)
    model = onnx.load(bundle.graph_path(graph), load_external_data=False)
    model.graph.name = name
    pieces = _redirect(model, bundle, graph, f"{name}.data")
    target = folder / f"{name}.onnx.zip"
    with (
        atomic_file(target) as partial,
        zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED, allowZip64=True) as archive,
    ):
        archive.writestr(zipfile.ZipInfo(f"{name}/{name}.onnx", _TIMESTAMP), model.SerializeToString())
        with archive.open(zipfile.ZipInfo(f"{name}/{name}.data", _TIMESTAMP), "w", force_zip64=True) as out:
            written = 0
            for piece in pieces:
                out.write(bytes(piece.target - written))
                with (bundle.path / piece.file).open("rb") as shard:
                    shard.seek(piece.source)
                    left = piece.length
                    while left:
                        block = shard.read(min(_BLOCK_BYTES, left))
                        out.write(block)
                        left -= len(block)
                written = piece.target + piece.length
    return PackedGraph(target, sha256_of(target))


def _redirect(model: onnx.ModelProto, bundle: Bundle, graph: GraphRecord, data: str) -> list[_Piece]:
    """Point every external weight into one file; what to copy there, in order."""
    pieces: dict[tuple[str, int, int], _Piece] = {}
    end = 0
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        file, source, length = entries["location"], int(entries.get("offset", 0)), int(entries["length"])
        listed = bundle.manifest.files.get(file)
        if listed is None or source + length > listed.bytes:
            raise BundleError(
                f"{graph.file}: {tensor.name}",
                got=f"bytes {source} to {source + length} of {file}",
                expected="bytes of a file of the bundle",
                fix="Export the bundle again.",
            )
        key = (file, source, length)
        if key not in pieces:
            start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            pieces[key] = _Piece(file, source, start, length)
            end = start + length
        del tensor.external_data[:]
        for name, value in (("location", data), ("offset", pieces[key].target), ("length", length)):
            tensor.external_data.add(key=name, value=str(value))
    return list(pieces.values())
