"""A vision encoder as a `.tflite` file of one signature."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgekv.bundle import ENCODER
from edgekv.graphs.encoder import EncoderOps, deepstack_rows, encoder_entry, encoder_exit, encoder_layer
from edgekv.spec import (
    COS_PORT,
    PADDING_PORT,
    PIXELS_PORT,
    PLACES_PORT,
    ROWS_PORT,
    SIN_PORT,
    EncoderSpec,
    deepstack_port,
)
from exporters.graphs.tflite.blocks import ROWS, TfliteBlocks, element_of
from exporters.graphs.tflite.flatbuffer import Subgraph, Tensor, TfliteFile
from exporters.graphs.tflite.weights import TfliteWeights
from exporters.quantize.encoder import EncoderTensors
from exporters.quantize.matrices import QuantizedMatrices
from quant import Encoding


class TfliteEncoder(TfliteBlocks, EncoderOps[Tensor]):
    """The subgraph of an encoder under construction."""

    def __init__(
        self, subgraph: Subgraph, spec: EncoderSpec, encodings: Mapping[str, Encoding], weights: TfliteWeights
    ) -> None:
        """Start with the pixels."""
        super().__init__(subgraph, encodings, weights, spec.eps)
        self._spec = spec
        self._inputs = {
            name: subgraph.input(name, element_of(encodings[name]), shape, encodings[name])
            for name, shape in spec.input_shapes.items()
        }
        self.entry = self._inputs[PIXELS_PORT]
        self._window_padding: Tensor | None = None

    def plus(self, x: Tensor, weight: str, name: str) -> Tensor:
        return self.add(x, self._weights.table(self._graph, weight), name)

    def merged(self, x: Tensor, rows: int) -> Tensor:
        count, width = x.shape[2:]
        return self._reshape(x, (1, 1, count // rows, rows * width), "merged")

    def averaged(self, x: Tensor, rows: int, name: str) -> Tensor:
        count, width = x.shape[2:]
        squares = self._reshape(x, (1, count // rows, rows, width), "squares")
        axis = self._integers("axis_rows", [ROWS])
        averages = self._emit(
            "MEAN", [squares, axis], name, (1, count // rows, 1, width), None, "ReducerOptions", keepDims=True
        )
        return self._reshape(averages, (1, 1, count // rows, width), "averages")

    def unmerged(self, x: Tensor) -> Tensor:
        count, width = x.shape[2:]
        return self._reshape(x, (1, 1, count * width, 1), "unmerged")

    def bounded(self, x: Tensor, name: str) -> Tensor:
        return x

    def places(self) -> Tensor:
        return self._inputs[PLACES_PORT]

    def turns(self) -> tuple[Tensor, Tensor]:
        return self._inputs[COS_PORT], self._inputs[SIN_PORT]

    def unpadded(self, scores: Tensor, name: str, *, in_windows: bool = False) -> Tensor:
        padding = self._inputs[PADDING_PORT]
        if in_windows:
            if self._window_padding is None:
                count = self._spec.windows
                shape = 1, count, 1, self._spec.inputs // count
                self._window_padding = self._reshape(padding, shape, "padding.windows")
            padding = self._window_padding
        return self.add(scores, padding, name)

    def in_windows(self, x: Tensor) -> list[Tensor]:
        count, width = x.shape[2:]
        return [self._reshape(x, (1, self._spec.windows, count // self._spec.windows, width), "windows")]

    def from_windows(self, parts: list[Tensor]) -> Tensor:
        (x,) = parts
        return self._reshape(x, (1, 1, x.shape[1] * x.shape[2], x.shape[3]), "rows")

    def rms_norm(self, x: Tensor, weight: str, name: str) -> Tensor:
        normal = self._normalized(x, name, self._eps)
        weighted = self._float("MUL", [normal, self._weights.norm(self._graph, weight, gain=1.0)], name + ".weighted")
        return self._emit("QUANTIZE", [weighted], name, x.shape)

    def rms_norm_parts(self, x: Tensor, weight: str, parts: int, eps: float, name: str) -> Tensor:
        raise NotImplementedError  # decoders with inputs of layers are refused

    def patches(self, x: Tensor) -> Tensor:
        return self._slice(x, ROWS, 0, self._spec.patches) if self._spec.has_class else x

    def normalize_merged(self, x: Tensor, name: str) -> Tensor:
        return self._emit("QUANTIZE", [self._normalized(x, name, self._spec.projector_eps)], name, x.shape)

    def finish(self, outputs: Mapping[str, Tensor]) -> None:
        """Make results the outputs of these names."""
        for port, rows in outputs.items():
            self._graph.output(port, rows)


def write_tflite_encoder(
    tensors: EncoderTensors, matrices: QuantizedMatrices, encodings: Mapping[str, Encoding], target: Path
) -> None:
    """Write the `.tflite` file of an encoder.

    Args:
        tensors: the weights that are not matrices.
        matrices: the integers of every matrix.
        encodings: one for every result, and those of input and output; int16.
        target: the file.
    """
    file, spec = TfliteFile(), tensors.spec
    weights = TfliteWeights(tensors.tensor, lambda _: spec.head_dim, matrices)
    ops = TfliteEncoder(file.subgraph(ENCODER), spec, encodings, weights)
    residual, behind = encoder_entry(ops, spec, ops.entry), dict[str, Tensor]()
    for layer in range(spec.layers):
        residual = encoder_layer(ops, spec, layer, residual)
        if layer in spec.deepstack:
            number = spec.deepstack.index(layer)
            behind[deepstack_port(number)] = deepstack_rows(ops, spec, number, residual)
        weights.forget()
    ops.finish({ROWS_PORT: encoder_exit(ops, spec, residual), **behind})
    file.save(target)
