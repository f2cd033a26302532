"""Builds the decoder as a subgraph of a `.tflite` file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from edgekv.errors import UsageError
from edgekv.graphs.decoder import Ops
from edgekv.spec import (
    LAYER_INPUTS_PORT,
    LOGITS,
    LOGITS_INDEX,
    DecoderInterface,
    DecoderSpec,
    GraphRecord,
    KvTensor,
    LoraTarget,
    Port,
)
from exporters.graphs.tflite.flatbuffer import ElementType, Subgraph, Tensor
from exporters.graphs.tflite.weights import TfliteWeights
from quant import Encoding

_ROWS, _WIDTH = 2, 3  # axes of [1, 1, rows, width]
_NORM_REACH = 128.0  # squares stay far below the largest float16, 65504


class TfliteOps(Ops[Tensor]):
    """A subgraph for AR new tokens in a context of S, under construction.

    Activations are int16 with zero point 0. RMSNorm, softmax and GELU compute in float between two conversions,
    because no int16 kernel for them is both exact and available in every runtime: tflite-runtime lacks RSQRT and GELU
    in int16, and in LiteRT they are off by tens of steps; SOFTMAX in int16 gives a masked position at least exp(-10),
    which adds up over a context.
    """

    def __init__(
        self,
        subgraph: Subgraph,
        graph: GraphRecord,
        decoder: DecoderInterface,
        spec: DecoderSpec,
        encodings: Mapping[str, Encoding],
        weights: TfliteWeights,
    ) -> None:
        """Start with the inputs that all layers share.

        Args:
            subgraph: an empty one.
            graph: AR, context and role.
            decoder: gives the inputs and outputs.
            spec: the decoder.
            encodings: one for every result and input.
            weights: the weights of the file.
        """
        self._graph = subgraph
        self._decoder = decoder
        self._ports = decoder.graph(graph)
        self._spec = spec
        self._encodings = encodings
        self._weights = weights
        self._cached: dict[KvTensor, Tensor] = {}
        self._ids = self._input(self._ports.entry)
        shared = (port for port in self._ports.inputs if port.kind in ("layer_inputs", "mask", "cos", "sin"))
        self._shared = {port.name: self._input(port) for port in shared}

    # ------------------------------------------------------------------ the operations of a decoder

    def embed(self, key: str, name: str) -> Tensor:
        """The rows of the embedding table for `input_ids`, `[1, 1, AR, hidden]`."""
        table = self._weights.table(self._graph, key)
        shape = [*self._ids.shape, table.shape[1]]
        rows = self._emit("GATHER", [table, self._ids], name, shape, table.encoding, "GatherOptions", axis=0)
        return self._reshape(rows, [1, *shape], name)

    def linear(
        self,
        x: Tensor,
        weight: str,
        name: str,
        *,
        bias: str | None = None,
        head: int | None = None,
        gain: float = 1.0,
    ) -> Tensor:
        matrix = self._weights.matrix(self._graph, weight, head=head, gain=gain)
        shape = [*x.shape[:-1], matrix.shape[0]]
        product = name if bias is None else name + ".unbiased"
        options = {"keepNumDims": True}
        inputs = [x, matrix, None]
        result = self._emit("FULLY_CONNECTED", inputs, product, shape, None, "FullyConnectedOptions", **options)
        if bias is None:
            return result
        # Not the operator's own bias: its scale is the product of those of x and the matrix, and int32 can overflow.
        return self.add(result, self._weights.bias(self._graph, bias, head=head, gain=gain), name)

    def delta_rule(self, spec: DecoderSpec, layer: int, x: Tensor) -> Tensor:
        raise UsageError(
            "--graph-format",
            got="tflite for a model with gated delta rules",
            expected="onnx",
            fix="Use --graph-format onnx.",
        )

    def adapt(
        self, y: Tensor, x: Tensor, layer: int, target: LoraTarget, name: str, *, head: int | None = None
    ) -> Tensor:
        return y

    def rms_norm(self, x: Tensor, weight: str, name: str, *, gain: float = 1.0) -> Tensor:
        normal = self._normalized(x, name)
        weighted = self._float("MUL", [normal, self._weights.norm(self._graph, weight, gain=gain)], name + ".weighted")
        return self._emit("QUANTIZE", [weighted], name, x.shape)

    def _normalized(self, x: Tensor, name: str) -> Tensor:
        """`x / rms(x)` in float."""
        assert x.encoding is not None
        # Scaling x by a factor and eps by its square changes nothing; a power of two is exact.
        factor = 2.0 ** math.floor(math.log2(_NORM_REACH / x.encoding.reach[1]))
        scaled = self._float("MUL", [self._dequantize(x, name), self._number(factor)], name + ".scaled")
        square = self._float("MUL", [scaled, scaled], name + ".square")
        mean = self._graph.result(name + ".mean", "f32", [*x.shape[:-1], 1])
        axis = self._integers("axis_width", [_WIDTH])
        self._graph.operate("MEAN", [square, axis], [mean], "ReducerOptions", {"keepDims": True})
        shifted = self._float("ADD", [mean, self._number(self._spec.eps * factor * factor)], name + ".shifted")
        inverse = self._float("RSQRT", [shifted], name + ".inverse")
        return self._float("MUL", [scaled, inverse], name + ".normal")

    def normalize(self, x: Tensor, width: int, name: str) -> Tensor:
        return self._emit("QUANTIZE", [self._normalized(x, name)], name, x.shape)

    def scale_by(self, x: Tensor, weight: str, name: str) -> Tensor:
        return self.multiply(x, self._weights.table(self._graph, weight), name)

    def layer_input(self, layer: int) -> Tensor:
        width = self._spec.layer_inputs
        return self.slice(self._shared[LAYER_INPUTS_PORT], layer * width, width)

    def add(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        return self._emit("ADD", [a, b], name, a.shape, None, "AddOptions", potScaleInt16=False)

    def subtract(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        return self._emit("SUB", [a, b], name, a.shape, None, "SubOptions", potScaleInt16=False)

    def multiply(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        return self._emit("MUL", [a, b], name, a.shape, None, "MulOptions")

    def scale(self, x: Tensor, factor: float, name: str) -> Tensor:
        encoding = Encoding.symmetric(factor, "s16")
        constant = self._graph.constant(
            f"factor_{factor!r}", "s16", [1], lambda: encoding.quantize(np.array([factor])), encoding=encoding
        )
        return self.multiply(x, constant, name)

    def sigmoid(self, x: Tensor, name: str) -> Tensor:
        return self._emit("LOGISTIC", [x], name, x.shape)

    def tanh(self, x: Tensor, name: str) -> Tensor:
        return self._emit("TANH", [x], name, x.shape)

    def sqrt(self, x: Tensor, name: str) -> Tensor:
        return self._in_float("SQRT", x, name)

    def sign(self, x: Tensor, name: str) -> Tensor:
        return self._in_float("SIGN", x, name)

    def gelu(self, x: Tensor, name: str) -> Tensor:
        result = self._graph.result(name + ".float", "f32", x.shape)
        self._graph.operate("GELU", [self._dequantize(x, name)], [result], "GeluOptions", {"approximate": True})
        return self._emit("QUANTIZE", [result], name, x.shape)

    def split(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        starts = itertools.accumulate(widths, initial=0)
        return [self.slice(x, start, width) for start, width in zip(starts, widths, strict=False)]

    def slice(self, x: Tensor, first: int, width: int) -> Tensor:
        shape = [*x.shape[:-1], width]
        begin, size = self._integers(f"begin_{first}", [0, 0, 0, first]), self._integers(_named(shape), shape)
        return self._emit("SLICE", [x, begin, size], "part", shape, x.encoding, "SliceOptions")

    def join(self, parts: list[Tensor], name: str) -> Tensor:
        shape = [*parts[0].shape[:-1], sum(part.shape[-1] for part in parts)]
        return self._emit("CONCATENATION", parts, name, shape, None, "ConcatenationOptions", axis=_WIDTH)

    def rotation(self, layer: int) -> tuple[Tensor, Tensor]:
        rotary = self._decoder.rotary_of(layer)
        assert rotary is not None, "the decoder rotates only layers that have an embedding"
        cos, sin = rotary.names
        return self._shared[cos], self._shared[sin]

    def append_to_cache(self, new: Tensor, tensor: KvTensor) -> Tensor:
        encoding = self._encodings[tensor.past]
        past = self._input(self._ports[tensor.past])
        added = self._emit("QUANTIZE", [new], tensor.new, new.shape, encoding)
        self._graph.output(tensor.new, added)
        name = f"{tensor.kind}_{tensor.layer}_h{tensor.head}"
        shape = [1, 1, past.shape[_ROWS] + new.shape[_ROWS], new.shape[_WIDTH]]
        rows = self._emit("CONCATENATION", [past, added], name, shape, encoding, "ConcatenationOptions", axis=_ROWS)
        if encoding.dtype != "s16":
            # No kernel multiplies int16 by int8, so the same integers are widened.
            rows = self._emit("CAST", [rows], name + ".wide", shape, Encoding("s16", encoding.scale, 0))
        self._cached[tensor] = rows
        return rows

    def cached(self, tensor: KvTensor) -> Tensor:
        return self._cached[tensor]

    def tap(self, rows: Tensor, weight: str, tap: int, name: str) -> Tensor:
        assert self._spec.convolution is not None, "a layer has one"
        ar = rows.shape[_ROWS] - (self._spec.convolution.kernel - 1)
        shape = [1, 1, ar, rows.shape[_WIDTH]]
        begin, size = self._integers(f"begin_row_{tap}", [0, 0, tap, 0]), self._integers(_named(shape), shape)
        read = self._emit("SLICE", [rows, begin, size], "rows", shape, rows.encoding, "SliceOptions")
        return self.multiply(read, self._weights.tap(self._graph, weight, tap), name)

    def scores(self, query: Tensor, keys: Tensor, name: str) -> Tensor:
        shape = [*query.shape[:-1], keys.shape[_ROWS]]
        return self._emit("BATCH_MATMUL", [query, keys], name, shape, None, "BatchMatMulOptions", adjY=True)

    def masked(self, scores: Tensor, layer: int, name: str) -> Tensor:
        return self.add(scores, self._shared[self._decoder.mask(layer)], name)

    def softmax(self, x: Tensor, name: str) -> Tensor:
        weights = self._graph.result(name + ".float", "f32", x.shape)
        self._graph.operate("SOFTMAX", [self._dequantize(x, name)], [weights], "SoftmaxOptions", {"beta": 1.0})
        return self._emit("QUANTIZE", [weights], name, x.shape)

    def attend(self, weights: Tensor, values: Tensor, name: str) -> Tensor:
        shape = [*weights.shape[:-1], values.shape[_WIDTH]]
        return self._emit("BATCH_MATMUL", [weights, values], name, shape, None, "BatchMatMulOptions")

    # ------------------------------------------------------------------ exit of a graph

    def select(self, hidden: Tensor) -> Tensor:
        """The row of `hidden` that the input `logits_index` selects, `[1, 1, 1, hidden]`."""
        index = self._input(self._ports[LOGITS_INDEX])
        shape = [1, 1, 1, hidden.shape[_WIDTH]]
        return self._emit("GATHER", [hidden, index], "selected", shape, hidden.encoding, "GatherOptions", axis=_ROWS)

    def finish(self, logits: Tensor) -> None:
        """Make `logits` the last output, `[1, rows, V]`."""
        self._graph.output(LOGITS, self._reshape(logits, self._ports.exit.shape, LOGITS))

    # ------------------------------------------------------------------ writing operators

    def _emit(
        self,
        operator: str,
        inputs: Sequence[Tensor | None],
        name: str,
        shape: Sequence[int],
        encoding: Encoding | None = None,
        kind: str | None = None,
        **options: object,
    ) -> Tensor:
        encoding = encoding or self._encodings[name]
        result = self._graph.result(name, _element(encoding), shape, encoding)
        self._graph.operate(operator, inputs, [result], kind, options)
        return result

    def _reshape(self, x: Tensor, shape: Sequence[int], name: str) -> Tensor:
        wanted = self._integers(_named(shape), shape)
        return self._emit("RESHAPE", [x, wanted], name, shape, x.encoding, "ReshapeOptions", newShape=list(shape))

    def _dequantize(self, x: Tensor, name: str) -> Tensor:
        result = self._graph.result(name + ".real", "f32", x.shape)
        self._graph.operate("DEQUANTIZE", [x], [result])
        return result

    def _in_float(self, operator: str, x: Tensor, name: str) -> Tensor:
        result = self._float(operator, [self._dequantize(x, name)], name + ".float")
        return self._emit("QUANTIZE", [result], name, x.shape)

    def _float(self, operator: str, inputs: Sequence[Tensor], name: str) -> Tensor:
        kind = {"MUL": "MulOptions", "ADD": "AddOptions"}.get(operator)
        result = self._graph.result(name, "f32", inputs[0].shape)
        self._graph.operate(operator, inputs, [result], kind)
        return result

    # ------------------------------------------------------------------ inputs and constants

    def _input(self, port: Port) -> Tensor:
        if port.encoding is None:
            return self._graph.input(port.name, "i32", port.shape)
        encoding = self._encodings[port.encoding]
        return self._graph.input(port.name, _element(encoding), port.shape, encoding)

    def _integers(self, key: str, values: Sequence[int]) -> Tensor:
        return self._graph.constant(key, "i32", [len(values)], lambda: np.array(values, np.int32))

    def _number(self, value: float) -> Tensor:
        return self._graph.constant(f"number_{value!r}", "f32", [1], lambda: np.array([value], np.float32))


def _named(shape: Sequence[int]) -> str:
    return "shape_" + "_".join(map(str, shape))


def _element(encoding: Encoding) -> ElementType:
    if encoding.dtype in ("s8", "s16"):
        return encoding.dtype
    raise ValueError(f"encoding: got {encoding.dtype}; expected s8 or s16, which the kernels support")
