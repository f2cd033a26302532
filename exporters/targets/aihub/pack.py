"""A graph as AI Hub accepts it: a zipped folder of one .onnx file and one .data file with its weights."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import onnx

from edgekv.bundle import Bundle, GraphRecord, open_bundle
from edgekv.errors import BundleError
from edgekv.machine.scratch import atomic_file
from exporters.pipeline.inputs import Inputs
from exporters.pipeline.piece import Piece
from exporters.targets.aihub.options import graph_name

_BLOCK_BYTES = 1 << 20
_ALIGNMENT_BYTES = 64
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)  # the earliest date of a zip: the same graph always gives the same file


@dataclass(frozen=True, slots=True)
class PackPiece(Piece):
    """A graph as it is uploaded.

    Attributes:
        bundle: name of the bundle.
        graph: the graph.
    """

    kind: ClassVar[str] = "pack"

    bundle: str
    graph: str

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.bundle,)

    def make(self, folder: Path, inputs: Inputs) -> object:
        bundle = open_bundle(inputs.bundle(self.bundle), verify=False)
        pack_graph(bundle, next(each for each in bundle.manifest.graphs if each.name == self.graph), folder)
        return None


@dataclass(frozen=True, slots=True)
class _Extent:
    """Bytes of a shard, and where they go in the .data file."""

    file: str
    source: int
    target: int
    length: int


def pack_graph(bundle: Bundle, graph: GraphRecord, folder: Path) -> Path:
    """Write `<graph name>.onnx.zip` into a folder, complete or not at all; returns its path.

    The weights are copied in blocks of 1 MiB, because a graph may be larger than the memory. They are stored
    uncompressed: integer weights hardly shrink.

    Raises:
        BundleError: a weight of the graph is not in the bundle.
    """
    name = graph_name(graph)
    model = onnx.load(bundle.graph_path(graph), load_external_data=False)
    model.graph.name = name
    extents = _redirect(model, bundle, graph, f"{name}.data")
    target = folder / f"{name}.onnx.zip"
    with (
        atomic_file(target) as partial,
        zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED, allowZip64=True) as archive,
    ):
        archive.writestr(zipfile.ZipInfo(f"{name}/{name}.onnx", _TIMESTAMP), model.SerializeToString())
        with archive.open(zipfile.ZipInfo(f"{name}/{name}.data", _TIMESTAMP), "w", force_zip64=True) as out:
            written = 0
            for extent in extents:
                out.write(bytes(extent.target - written))
                with (bundle.path / extent.file).open("rb") as shard:
                    shard.seek(extent.source)
                    left = extent.length
                    while left:
                        block = shard.read(min(_BLOCK_BYTES, left))
                        out.write(block)
                        left -= len(block)
                written = extent.target + extent.length
    return target


def _redirect(model: onnx.ModelProto, bundle: Bundle, graph: GraphRecord, data: str) -> list[_Extent]:
    """Point every external weight into one file; what to copy there, in order."""
    extents: dict[tuple[str, int, int], _Extent] = {}
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
        if key not in extents:
            start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            extents[key] = _Extent(file, source, start, length)
            end = start + length
        del tensor.external_data[:]
        for name, value in (("location", data), ("offset", extents[key].target), ("length", length)):
            tensor.external_data.add(key=name, value=str(value))
    return list(extents.values())
