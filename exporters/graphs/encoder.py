"""Builds the static ONNX graph of a vision encoder, in which every result is quantized."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from edgekv.bundle import ENCODER
from edgekv.graphs.encoder import EncoderOps, encoded
from edgekv.spec import COS_PORT, PADDING_PORT, PIXELS_PORT, PLACES_PORT, SIN_PORT, EncoderSpec
from exporters.graphs.blocks import QdqBlocks
from exporters.graphs.nodes import Tensor
from exporters.graphs.qdq import make_model
from exporters.graphs.weights import StoredWeights
from quant import DTYPES, Encoding


class QdqEncoder(QdqBlocks, EncoderOps[Tensor]):
    """The graph of an encoder under construction."""

    def __init__(self, spec: EncoderSpec, encodings: Mapping[str, Encoding], weights: StoredWeights) -> None:
        """Start with the pixels."""
        super().__init__(encodings, weights, spec.hidden, spec.eps)
        self._spec = spec
        self._inputs = {name: self._nodes.dequantize(name, name + "_dq", encodings[name]) for name in spec.input_shapes}
        self.entry = self._inputs[PIXELS_PORT]
        self._window_padding: Tensor | None = None

    def plus(self, x: Tensor, weight: str, name: str) -> Tensor:
        return self._nodes.emit("Add", [x.name, self._weight(*self._weights.tensor(weight))], name)

    def merged(self, x: Tensor, rows: int) -> Tensor:
        return self._reshape(x, x.name + ".merged", (1, 1, self._spec.slots // rows, -1))

    def averaged(self, x: Tensor, rows: int, name: str) -> Tensor:
        nodes, count = self._nodes, self._spec.slots // rows
        squares = self._reshape(x, x.name + ".squares", (1, count, rows, -1))
        axis = nodes.constant("axis_2", np.array([2], np.int64))
        averages = nodes.emit("ReduceMean", [squares.name, axis], name, keepdims=1)
        return self._reshape(averages, name + ".rows", (1, 1, count, -1))

    def unmerged(self, x: Tensor) -> Tensor:
        return self._reshape(x, x.name + ".unmerged", (1, 1, -1, 1))

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
                shape = 1, self._spec.windows, 1, -1
                self._window_padding = self._reshape(padding, "vision.probabilities.padding", shape)
            padding = self._window_padding
        return self._nodes.emit("Add", [scores.name, padding.name], name)

    def in_windows(self, x: Tensor) -> list[Tensor]:
        return [self._reshape(x, x.name + ".windows", (1, self._spec.windows, -1, self._spec.head_dim))]

    def from_windows(self, parts: list[Tensor]) -> Tensor:
        (x,) = parts
        return self._reshape(x, x.name + ".rows", (1, 1, -1, self._spec.head_dim))

    def rms_norm(self, x: Tensor, weight: str, name: str) -> Tensor:
        gamma = self._weight(*self._weights.tensor(weight))
        return self._nodes.emit("RMSNormalization", [x.name, gamma], name, axis=-1, epsilon=self._eps)

    def rms_norm_parts(self, x: Tensor, weight: str, parts: int, eps: float, name: str) -> Tensor:
        nodes, gamma, (width,) = self._nodes, self._weight(*self._weights.tensor(weight)), self._spec.tensors[weight]
        encoding, results = self._encodings[name], list[Tensor]()
        for part in range(parts):  # an axis of parts would be another layout, which takes as long as a layer
            bounds = part * width, (part + 1) * width, 3
            begin, end, axis = (nodes.constant(f"at_{at}", np.array([at], np.int64)) for at in bounds)
            own = nodes.emit("Slice", [x.name, begin, end, axis], x.name + ".part", x.encoding)
            results.append(
                nodes.emit("RMSNormalization", [own.name, gamma], name + ".part", encoding, axis=-1, epsilon=eps)
            )
        return self.join(results, name)

    def patches(self, x: Tensor) -> Tensor:
        spec, nodes = self._spec, self._nodes
        if not spec.has_class:
            return x
        begin, end, axis = (nodes.constant(f"at_{at}", np.array([at], np.int64)) for at in (0, spec.patches, 2))
        return nodes.emit("Slice", [x.name, begin, end, axis], x.name + ".patches", x.encoding)

    def normalize_merged(self, x: Tensor, name: str) -> Tensor:
        return self._normalized(x, self._spec.merged_width, name, self._spec.projector_eps)

    def finish(self, outputs: Mapping[str, Tensor]) -> onnx.ModelProto:
        """The model whose outputs are the integers of these results. Flush the store first."""
        spec, nodes = self._spec, self._nodes.nodes
        for port, result in outputs.items():
            reader = next(node for node in nodes if node.output[0] == result.name)
            next(node for node in nodes if node.output[0] == reader.input[0]).output[0] = port
            reader.input[0] = port
            if not any(result.name in node.input for node in nodes):
                nodes.remove(reader)
        stored = [self._weights.initializer(name) for name in self._stored]
        inputs, features = (
            [
                onnx.helper.make_tensor_value_info(
                    name, onnx.helper.np_dtype_to_tensor_dtype(DTYPES[self._encodings[name].dtype]), shape
                )
                for name, shape in shapes.items()
            ]
            for shapes in (spec.input_shapes, {name: spec.outputs[name] for name in outputs})
        )
        return make_model(ENCODER, nodes, inputs, features, [*self._nodes.constants, *stored])

    def build(self) -> dict[str, Tensor]:
        """Write the whole graph; its results by the names of the outputs."""
        return encoded(self, self._spec, self.entry)
