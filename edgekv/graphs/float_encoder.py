"""The CPU's graph of a vision encoder for speed: the bundle's integers as weights, floats between the operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from edgekv.bundle import ENCODER, BundleWeights, VisionRecord
from edgekv.graphs.cpu_mode import RenderedMode
from edgekv.graphs.encoder import EncoderOps, encoded
from edgekv.graphs.products import Products, Rows
from edgekv.graphs.stacks import HeadStacks, View
from edgekv.graphs.weight_file import WeightFile
from edgekv.spec import COS_PORT, PADDING_PORT, PIXELS_PORT, PLACES_PORT, SIN_PORT
from quant import DTYPES


class FloatEncoderOps(HeadStacks, EncoderOps[View]):
    """Results stay float. All heads are one operation."""

    def __init__(self, vision: VisionRecord, weights: BundleWeights, mode: RenderedMode, file: WeightFile) -> None:
        """Start with the pixels.

        Args:
            weights: of the encoder.
            mode: how activations are rounded in products.
            file: takes the integers as the products read them.
        """
        super().__init__(weights, vision.encoder.inputs)
        self._spec, self._vision = vision.encoder, vision
        self._products = Products(self._nodes, file, mode, is_scoring=False, batch_invariant=False, in_groups=False)
        self._normal: set[str] = set()
        """Results of norms."""
        self.entry = self._rows_of(PIXELS_PORT)

    def _input(self, port: str) -> str:
        return self._once(
            ("input", port), lambda: self._nodes.dequantize(port, [self._vision.encodings[port]], port + ".real")
        )

    def _rows_of(self, port: str) -> View:
        return View(self._nodes.reshape(self._input(port), [1, self._spec.inputs, -1]))

    def bounded(self, x: View, name: str) -> View:
        if (bound := self._spec.bound_of(name)) is None:
            return x
        ends = (self._once(("end", end), partial(self._nodes.number, end)) for end in (bound.low, bound.high))
        return self._each("Clip", [x], name + ".bounded", [*ends])

    def places(self) -> View:
        return self._rows_of(PLACES_PORT)

    def turns(self) -> tuple[View, View]:
        return View(self._input(COS_PORT)), View(self._input(SIN_PORT))

    def unpadded(self, scores: View, name: str, *, in_windows: bool = False) -> View:
        padding = self._input(PADDING_PORT)
        if in_windows:
            shape = [1, self._spec.windows, 1, -1]
            padding = self._once(("in windows", padding), lambda: self._nodes.reshape(padding, shape))
        return self._each("Add", [scores], name, [padding])

    def in_windows(self, x: View) -> list[View]:
        shape = [x.heads, self._spec.windows, -1, self._spec.head_dim]
        return [replace(x, tensor=self._once(("windows", x.tensor), lambda: self._nodes.reshape(x.tensor, shape)))]

    def from_windows(self, parts: list[View]) -> View:
        (x,) = parts
        shape = [x.heads, 1, -1, self._spec.head_dim]
        return replace(x, tensor=self._once(("rows", x.tensor), lambda: self._nodes.reshape(x.tensor, shape)))

    def silu(self, x: View, at: str) -> View:
        return self._each("QuickGelu", [x], at + "silu", alpha=1.0)

    def linear(
        self, x: View, weight: str, name: str, *, bias: str | None = None, head: int | None = None, gain: float = 1.0
    ) -> View:
        def product() -> str:
            rows = Rows(x.tensor, f"rows of {x.tensor}", self._spec.inputs, x.tensor in self._normal, True)
            result = self._products.multiply(rows, self._weights.matrix(weight), weight)
            if bias is not None:
                added = self._nodes.constant(self._bias(bias, is_by_head=head is not None, gain=gain), f"{name}.bias")
                result = self._nodes.add("Add", [result, added], name)
            return result if head is None else self._to_heads(result, self._spec.heads)

        tensor = self._once(("linear", x.tensor, weight), product)
        return View(tensor) if head is None else View(tensor, self._spec.heads, head)

    def _bias(self, name: str, *, is_by_head: bool, gain: float) -> NDArray[np.float32]:
        if is_by_head:
            return np.concatenate([self._values(f"{name}.h{head}", gain) for head in range(self._spec.heads)])
        return self._values(name, gain)

    def normalize(self, x: View, width: int, name: str) -> View:
        return self._normalized(x, self._unit_weights(width), name, self._spec.eps)

    def rms_norm(self, x: View, weight: str, name: str) -> View:
        return self._normalized(x, self._floats(weight), name, self._spec.eps)

    def rms_norm_parts(self, x: View, weight: str, parts: int, eps: float, name: str) -> View:
        split = View(self._nodes.reshape(x.tensor, [self._spec.output_rows, parts, -1]))
        normal = self._normalized(split, self._floats(weight), name, eps)
        return View(self._nodes.reshape(normal.tensor, [1, self._spec.output_rows, -1]))

    def averaged(self, x: View, rows: int, name: str) -> View:
        squares = self._nodes.reshape(x.tensor, [self._spec.slots // rows, rows, -1])
        axis = self._nodes.constant(np.array([1], np.int64), "axis_1")
        averages = self._nodes.add("ReduceMean", [squares, axis], name, keepdims=0)
        return View(self._nodes.reshape(averages, [1, self._spec.slots // rows, -1]))

    def normalize_merged(self, x: View, name: str) -> View:
        weights = self._unit_weights(self._spec.merged_width)
        return self._normalized(x, weights, name, self._spec.projector_eps)

    def _normalized(self, x: View, weights: str, name: str, eps: float) -> View:
        attributes = {"axis": -1, "epsilon": eps, "stash_type": 1}
        normalized = self._each("SimplifiedLayerNormalization", [x], name, [weights], **attributes)
        self._normal.add(normalized.tensor)
        return normalized

    def plus(self, x: View, weight: str, name: str) -> View:
        return self._each("Add", [x], name, [self._floats(weight)])

    def merged(self, x: View, rows: int) -> View:
        reshaped = self._nodes.reshape(x.tensor, [1, self._spec.slots // rows, -1])
        if x.tensor in self._normal:
            self._normal.add(reshaped)
        return View(reshaped)

    def unmerged(self, x: View) -> View:
        return View(self._nodes.reshape(x.tensor, [1, -1, 1]))

    def patches(self, x: View) -> View:
        if not self._spec.has_class:
            return x
        return View(self._nodes.split(x.tensor, [self._spec.patches, 1], 1)[0])

    def _rounded(self, x: str, name: str, heads: int = 0) -> View:
        return View(x, heads)

    def _by_keys(self, query: View, keys: View) -> str:
        return self._multiply(query.tensor, keys.tensor, self._ar, transposed=True)

    def _by_values(self, weights: View, values: View) -> str:
        return self._multiply(weights.tensor, values.tensor, self._ar)

    def finish(self, outputs: Mapping[str, View]) -> onnx.ModelProto:
        """The model with these outputs."""
        spec, encodings, nodes = self._spec, self._vision.encodings, self._nodes
        shapes = {port: spec.outputs[port] for port in outputs}
        for port, view in outputs.items():
            last, encoding = nodes.reshape(view.tensor, shapes[port]), encodings[port]
            zero_point = nodes.number(encoding.zero_point, DTYPES[encoding.dtype].type)
            nodes.write("QuantizeLinear", [last, nodes.number(encoding.scale), zero_point], [port])
        inputs, features = (
            [
                helper.make_tensor_value_info(
                    name, helper.np_dtype_to_tensor_dtype(DTYPES[encodings[name].dtype]), shape
                )
                for name, shape in ports.items()
            ]
            for ports in (spec.input_shapes, shapes)
        )
        return nodes.model(ENCODER, inputs, features)


def float_encoder(
    vision: VisionRecord, weights: BundleWeights, mode: RenderedMode, file: WeightFile
) -> onnx.ModelProto:
    """The graph of an encoder; see `FloatEncoderOps`."""
    ops = FloatEncoderOps(vision, weights, mode, file)
    return ops.finish(encoded(ops, vision.encoder, ops.entry))
