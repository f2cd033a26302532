"""What the CPU's graph of a part is built from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgekv.bundle import GraphRecord, Manifest, PartRecord


@dataclass(frozen=True, slots=True)
class PartSource:
    """A part of a graph of a bundle.

    Attributes:
        folder: of the bundle.
        manifest: of the bundle.
        graph: the first graph with this part.
        part: the part.
    """

    folder: Path
    manifest: Manifest
    graph: GraphRecord
    part: PartRecord

    @classmethod
    def of(cls, folder: Path, manifest: Manifest, file: str) -> PartSource:
        """The part that is stored in a file.

        Raises:
            ValueError: there is none.
        """
        parts = ((graph, part) for graph in manifest.graphs for part in graph.parts if part.file == file)
        if (found := next(parts, None)) is None:
            raise ValueError(f"file: got {file}; expected a graph of the bundle {folder}")
        return cls(folder, manifest, *found)

    @property
    def file(self) -> Path:
        """The part's ONNX file, for the HTP."""
        return self.folder / self.part.file

    @property
    def content(self) -> bytes:
        """All that a graph is built from, but for the content of weights: equal for equal graphs."""
        manifest, graph = self.manifest, self.graph
        said = (manifest.model, manifest.encodings, manifest.weights, manifest.lora)
        sizes = manifest.context, manifest.kv_dtype, manifest.key_layout, graph.ar, graph.context, graph.role
        return msgspec.json.encode((said, sizes, self.part), order="deterministic")
