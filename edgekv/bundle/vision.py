"""The vision encoder of a bundle in its manifest."""

from __future__ import annotations

from edgekv.bundle.formats import GraphFormat
from edgekv.bundle.records import Count, Record
from edgekv.bundle.weights import WeightPlaces
from edgekv.machine.graph_file import GRAPH_SUFFIX
from edgekv.spec import EncoderSpec, PictureSpec
from quant import Encoding

ENCODER = "vision"
"""The name of an encoder's graph."""
ENCODER_FILES: dict[GraphFormat, str] = {"onnx": f"vision{GRAPH_SUFFIX}", "tflite": "vision.tflite"}


class VisionRecord(Record, frozen=True):
    """The vision encoder: a graph of one resolution, from pixels to rows that stand for embeddings.

    Attributes:
        file: the graph.
        encoder: its sizes.
        pictures: how pictures become its inputs, and where their rows stand in a prompt.
        encodings: of its results by name, with those of its input and output.
        weights: the places of its weights; none for a `.tflite` file, which holds them.
        calibration: the pictures that its results were observed on: `drawn`, or a folder.
        calibration_tiles: their number.
    """

    file: str
    encoder: EncoderSpec
    pictures: PictureSpec
    encodings: dict[str, Encoding]
    weights: WeightPlaces
    calibration: str
    calibration_tiles: Count

    @property
    def shown(self) -> str:
        """The sizes of what it encodes, in words."""
        edge, step, sizes = self.encoder.image, self.encoder.patch * self.encoder.merge, self.pictures.sizes
        if sizes:
            return "pictures of " + " or ".join(f"{width} x {height}" for width, height in sizes) + " pixels"
        if self.pictures.shapes is not None and self.pictures.tiling == "none":
            return f"pictures of any shape of at most {self.encoder.rows * step**2:,} pixels"
        return f"tiles of {edge} x {edge} pixels"
