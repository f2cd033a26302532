"""The piece of a vision encoder: its graph, its weights, and what a manifest says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import ENCODER_FILES, GraphFormat, RotationName, VisionRecord, WeightPlaces
from edgekv.machine.graph_file import write_graph
from edgekv.pictures import encoder_inputs, row_places
from edgekv.spec import EncoderSpec, PictureSpec
from exporters.checkpoint.rotate import ResidualRotation
from exporters.checkpoint.vision import RotatedEncoder, VisionEncoder, WideEncoder
from exporters.graphs.encoder import QdqEncoder
from exporters.graphs.weights import ShardWriter
from exporters.pipeline.inputs import PICTURE_ROWS, DecoderKey, Inputs
from exporters.pipeline.piece import Piece
from exporters.quantize.encoder import EncoderTensors, quantize_encoder
from quant import Method

SHARD, _TILES = "weights-vision.safetensors", "tiles.npz"


class EncoderResult(VisionRecord, frozen=True, kw_only=True):
    """What a manifest says of an encoder, and how far its rows reach.

    Attributes:
        low: the least element of a row that its encoding has.
        high: the greatest.
        behind_low: the same of the rows that the decoder adds behind layers; 0 without.
        behind_high: the greatest.
    """

    low: float
    high: float
    behind_low: float
    behind_high: float

    @property
    def record(self) -> VisionRecord:
        """For the manifest."""
        return VisionRecord(**{name: getattr(self, name) for name in VisionRecord.__struct_fields__})


@dataclass(frozen=True, slots=True)
class EncoderPiece(Piece):
    """A vision encoder in integers; answers `EncoderResult`.

    Attributes:
        exact: the decoder, whose residual its rows belong to.
        encoder: its sizes.
        pictures: how pictures become its inputs.
        rotation: of the decoder's residual.
        tiles: name of the pictures to calibrate on.
        calibration: what a manifest calls them.
        graph_format: of the graph.
        method: how matrices are rounded.
    """

    kind: ClassVar[str] = "encoder"

    exact: DecoderKey
    encoder: EncoderSpec
    pictures: PictureSpec
    rotation: RotationName
    tiles: str
    calibration: str
    graph_format: GraphFormat
    method: Method = "nearest"

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.tiles,)

    def make(self, folder: Path, inputs: Inputs) -> EncoderResult:
        vision = inputs.encoder(self.exact).with_sizes(self.pictures.sizes)
        if (msgspec.structs.replace(vision.spec, wide=self.encoder.wide), vision.pictures) != (
            self.encoder,
            self.pictures,
        ):
            raise ValueError(f"encoder: got {vision.spec}; expected {self.encoder}")
        base: VisionEncoder | RotatedEncoder = vision
        turn = None
        if self.rotation != "none":
            rotation = ResidualRotation(self.exact.spec, inputs.exact(self.exact).tensor, self.rotation)
            base = RotatedEncoder(vision, rotation.writing)
            turn = rotation.writing(np.eye(self.encoder.output, dtype=np.float32))
        tensors: EncoderTensors = WideEncoder(base, self.encoder.wide) if self.encoder.wide else base
        tiles = _read_tiles(inputs.store.path(self.tiles))
        shown = [encoder_inputs(tile, self.encoder, self.pictures) for tile in tiles]
        steps = self.encoder.layers + 1
        told = partial(inputs.progress, "encoder")
        activations: Literal["u16", "s16"] = "u16" if self.graph_format == "onnx" else "s16"
        quantized = quantize_encoder(
            tensors, self.pictures, shown, activations, self.method, done=lambda layers: told(layers, steps)
        )
        target, places = folder / ENCODER_FILES[self.graph_format], WeightPlaces()
        if self.graph_format == "tflite":
            from exporters.graphs.tflite.encoder import write_tflite_encoder  # its package is optional

            write_tflite_encoder(tensors, quantized.matrices, quantized.encodings, target)
        else:
            store = ShardWriter(tensors.tensor, lambda _: self.encoder.head_dim, quantized.matrices)
            graph = QdqEncoder(self.encoder, quantized.encodings, store)
            outputs = graph.build()
            store.write(folder / SHARD)
            write_graph(graph.finish(outputs).SerializeToString(), target)
            places = store.places
        rows = np.concatenate(quantized.rows)
        if turn is not None:  # its inverse is its transpose
            rows = (rows.reshape(-1, len(turn)) @ turn).reshape(rows.shape)
        in_pictures = np.concatenate([row_places(*self.encoder.grid_of(*tile.shape[1::-1])) for tile in tiles])
        np.savez(folder / PICTURE_ROWS, rows=rows, places=in_pictures)
        told(steps, steps)
        return EncoderResult(
            file=target.name,
            encoder=self.encoder,
            pictures=self.pictures,
            encodings=quantized.encodings,
            weights=places,
            calibration=self.calibration,
            calibration_tiles=len(tiles),
            low=quantized.reach[0],
            high=quantized.reach[1],
            behind_low=quantized.behind[0],
            behind_high=quantized.behind[1],
        )


def write_tiles(tiles: Sequence[NDArray[np.uint8]], folder: Path) -> None:
    """Write what an encoder is calibrated on."""
    np.savez(folder / _TILES, *tiles)


def _read_tiles(folder: Path) -> list[NDArray[np.uint8]]:
    with np.load(folder / _TILES, allow_pickle=False) as file:
        return [file[name] for name in file.files]
