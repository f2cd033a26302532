"""Builds the static ONNX graph of a vision encoder, in which every result is quantized."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from edgekv.bundle import ENCODER
from edgekv.graphs.encoder import EncoderOps, encoder_entry, encoder_exit, encoder_layer
from edgekv.spec import PADDING_PORT, PIXELS_PORT, PLACES_PORT, ROWS_PORT, EncoderSpec
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

    def plus(self, x: Tensor, weight: str, name: str) -> Tensor:
        return self._nodes.emit("Add", [x.name, self._weight(*self._weights.tensor(weight))], name)

    def merged(self, x: Tensor, rows: int) -> Tensor:
        return self._reshape(x, x.name + ".merged", (1, 1, self._spec.patches // rows, -1))

    def unmerged(self, x: Tensor) -> Tensor:
        return self._reshape(x, x.name + ".unmerged", (1, 1, -1, 1))

    def places(self) -> Tensor:
        return self._inputs[PLACES_PORT]

    def unpadded(self, scores: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Add", [scores.name, self._inputs[PADDING_PORT].name], name)

    def rms_norm(self, x: Tensor, weight: str, name: str) -> Tensor:
        gamma = self._weight(*self._weights.tensor(weight))
        return self._nodes.emit("RMSNormalization", [x.name, gamma], name, axis=-1, epsilon=self._eps)

    def patches(self, x: Tensor) -> Tensor:
        spec, nodes = self._spec, self._nodes
        if not spec.has_class:
            return x
        begin, end, axis = (nodes.constant(f"at_{at}", np.array([at], np.int64)) for at in (0, spec.patches, 2))
        return nodes.emit("Slice", [x.name, begin, end, axis], x.name + ".patches", x.encoding)

    def normalize_merged(self, x: Tensor, name: str) -> Tensor:
        return self._normalized(x, self._spec.hidden * self._spec.merged, name, self._spec.projector_eps)

    def finish(self) -> onnx.ModelProto:
        """The model. Flush the store first."""
        spec, last = self._spec, self._nodes.nodes.pop()
        self._nodes.nodes[-1].output[0] = ROWS_PORT  # the integers of the newest result
        assert last.op_type == "DequantizeLinear", "it is dequantized last"
        stored = [self._weights.initializer(each) for each in self._stored]
        shapes = spec.input_shapes | {ROWS_PORT: (1, 1, spec.rows, spec.output)}
        *inputs, rows = (
            onnx.helper.make_tensor_value_info(
                name, onnx.helper.np_dtype_to_tensor_dtype(DTYPES[self._encodings[name].dtype]), shape
            )
            for name, shape in shapes.items()
        )
        return make_model(ENCODER, self._nodes.nodes, inputs, [rows], [*self._nodes.constants, *stored])


def build_encoder(spec: EncoderSpec, encodings: Mapping[str, Encoding], weights: StoredWeights) -> QdqEncoder:
    """The whole graph, ready to finish."""
    ops = QdqEncoder(spec, encodings, weights)
    residual = encoder_entry(ops, spec, ops.entry)
    for layer in range(spec.layers):
        residual = encoder_layer(ops, spec, layer, residual)
    encoder_exit(ops, spec, residual)
    return ops
