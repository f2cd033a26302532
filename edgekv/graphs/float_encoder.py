"""The CPU's graph of a vision encoder for speed: the bundle's integers as weights, floats between the operations."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from edgekv.bundle import ENCODER, BundleWeights, VisionRecord
from edgekv.graphs.cpu_mode import RenderedMode
from edgekv.graphs.encoder import EncoderOps, encoder_entry, encoder_exit, encoder_layer
from edgekv.graphs.nodes import Nodes
from edgekv.graphs.products import Products, Rows
from edgekv.graphs.weight_file import WeightFile
from edgekv.spec import PIXELS_PORT, ROWS_PORT
from quant import DTYPES


@dataclass(frozen=True, slots=True)
class Activation:
    """A tensor under construction.

    Attributes:
        tensor: its name: `[1, rows, width]`, or `[1, heads, rows, width]` if it is one head of all.
        is_normal: whether it is the result of a norm.
        is_head: whether it stands for a head; the first of them has made the nodes for all.
    """

    tensor: str
    is_normal: bool = False
    is_head: bool = False


class FloatEncoderOps(EncoderOps[Activation]):
    """Results stay float. All heads are one operation."""

    def __init__(self, vision: VisionRecord, weights: BundleWeights, mode: RenderedMode, file: WeightFile) -> None:
        """Start with the pixels.

        Args:
            vision: the encoder.
            weights: of the encoder.
            mode: how activations are rounded in products.
            file: takes the integers as the products read them.
        """
        self._spec, self._weights, self._vision = vision.encoder, weights, vision
        self._nodes = Nodes()
        self._products = Products(self._nodes, file, mode, is_scoring=False, batch_invariant=False)
        self._made: dict[Hashable, str] = {}
        pixels = self._nodes.dequantize(PIXELS_PORT, [vision.encodings[PIXELS_PORT]], "pixels")
        self.entry = Activation(self._nodes.reshape(pixels, [1, self._spec.inputs, self._spec.patch_values]))

    def linear(
        self,
        x: Activation,
        weight: str,
        name: str,
        *,
        bias: str | None = None,
        head: int | None = None,
        gain: float = 1.0,
    ) -> Activation:
        def product() -> str:
            count = self._spec.inputs
            found = self._products.multiply(
                Rows(x.tensor, count, x.is_normal, True), self._weights.matrix(weight), weight
            )
            if bias is not None:
                added = self._nodes.constant(self._bias(bias, is_by_head=head is not None, gain=gain), f"{name}.bias")
                found = self._nodes.add("Add", [found, added], name)
            if head is None:
                return found
            return self._nodes.transpose(self._nodes.reshape(found, [0, 0, self._spec.heads, -1]), 0, 2, 1, 3)

        return Activation(self._once(weight, product), is_head=head is not None)

    def _bias(self, name: str, *, is_by_head: bool, gain: float) -> NDArray[np.float32]:
        if is_by_head:
            return np.concatenate([self._values(f"{name}.h{head}", gain) for head in range(self._spec.heads)])
        return self._values(name, gain)

    def _values(self, name: str, gain: float = 1.0) -> NDArray[np.float32]:
        return self._weights.places.tensors[name].encoding.times(gain).dequantize(self._weights.tensor(name))

    def normalize(self, x: Activation, width: int, name: str) -> Activation:
        return self._normalized(x, width, name, self._spec.eps)

    def normalize_merged(self, x: Activation, name: str) -> Activation:
        return self._normalized(x, self._spec.hidden * self._spec.merged, name, self._spec.projector_eps)

    def _normalized(self, x: Activation, width: int, name: str, eps: float) -> Activation:
        ones = self._nodes.constant(np.ones(width, np.float32), f"ones_{width}")
        attributes = {"axis": -1, "epsilon": eps, "stash_type": 1}
        return Activation(self._nodes.add("SimplifiedLayerNormalization", [x.tensor, ones], name, **attributes), True)

    def add(self, a: Activation, b: Activation, name: str) -> Activation:
        if a.is_head:
            key = "add", a.tensor, b.tensor
            return replace(a, tensor=self._once(key, lambda: self._nodes.add("Add", [a.tensor, b.tensor], name)))
        return Activation(self._nodes.add("Add", [a.tensor, b.tensor], name))

    def plus(self, x: Activation, weight: str, name: str) -> Activation:
        return Activation(self._nodes.add("Add", [x.tensor, self._nodes.constant(self._values(weight), weight)], name))

    def gelu(self, x: Activation, name: str) -> Activation:
        return Activation(self._nodes.add("Gelu", [x.tensor], name, approximate="tanh"))

    def exact_gelu(self, x: Activation, name: str) -> Activation:
        return Activation(self._nodes.add("Gelu", [x.tensor], name))

    def scores(self, query: Activation, keys: Activation, name: str) -> Activation:
        nodes = self._nodes

        def products() -> str:
            return nodes.add("MatMul", [query.tensor, nodes.transpose(keys.tensor, 0, 1, 3, 2)], name)

        return replace(query, tensor=self._once(("scores", query.tensor), products))

    def softmax(self, x: Activation, name: str) -> Activation:
        return replace(
            x, tensor=self._once(("softmax", x.tensor), lambda: self._nodes.add("Softmax", [x.tensor], name))
        )

    def attend(self, weights: Activation, values: Activation, name: str) -> Activation:
        def products() -> str:
            return self._nodes.add("MatMul", [weights.tensor, values.tensor], name)

        return replace(values, tensor=self._once(("attend", weights.tensor), products))

    def join(self, parts: list[Activation], name: str) -> Activation:
        assert {part.tensor for part in parts} == {parts[0].tensor}, "all heads"
        by_row = self._nodes.transpose(parts[0].tensor, 0, 2, 1, 3)
        return Activation(self._nodes.reshape(by_row, [1, -1, self._spec.hidden]))

    def merged(self, x: Activation, rows: int) -> Activation:
        found = self._nodes.reshape(x.tensor, [1, self._spec.patches // rows, -1])
        return Activation(found, x.is_normal)

    def unmerged(self, x: Activation) -> Activation:
        return Activation(self._nodes.reshape(x.tensor, [1, -1, 1]))

    def patches(self, x: Activation) -> Activation:
        if not self._spec.has_class:
            return x
        return Activation(self._nodes.split(x.tensor, [self._spec.patches, 1], 1)[0])

    def finish(self, rows: Activation) -> onnx.ModelProto:
        """The model, with the last rows as its output."""
        spec, encodings = self._spec, self._vision.encodings
        last = self._nodes.reshape(rows.tensor, [1, 1, spec.rows, spec.output])
        encoding = encodings[ROWS_PORT]
        self._nodes.write(
            "QuantizeLinear",
            [
                last,
                self._nodes.number(encoding.scale),
                self._nodes.number(encoding.zero_point, DTYPES[encoding.dtype].type),
            ],
            [ROWS_PORT],
        )
        shapes = {PIXELS_PORT: (1, 1, spec.inputs, spec.patch_values), ROWS_PORT: (1, 1, spec.rows, spec.output)}
        pixels, features = (
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(DTYPES[encodings[name].dtype]), shape)
            for name, shape in shapes.items()
        )
        return self._nodes.model(ENCODER, [pixels], [features])

    def _once(self, key: Hashable, make: Callable[[], str]) -> str:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def float_encoder(
    vision: VisionRecord, weights: BundleWeights, mode: RenderedMode, file: WeightFile
) -> onnx.ModelProto:
    """The graph of an encoder; see `FloatEncoderOps`."""
    ops, spec = FloatEncoderOps(vision, weights, mode, file), vision.encoder
    residual = encoder_entry(ops, spec, ops.entry)
    for layer in range(spec.layers):
        residual = encoder_layer(ops, spec, layer, residual)
    return ops.finish(encoder_exit(ops, spec, residual))
