"""The operations that decoders and vision encoders share, as operators of a subgraph of a `.tflite` file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from exporters.graphs.tflite.flatbuffer import ElementType, Subgraph, Tensor
from exporters.graphs.tflite.weights import TfliteWeights
from quant import Encoding

ROWS, WIDTH = 2, 3  # axes of [1, 1, rows, width]
_NORM_REACH = 128.0  # squares stay far below the largest float16, 65504


class TfliteBlocks:
    """A subgraph under construction; `BlockOps`.

    Activations are int16 with zero point 0. RMSNorm, softmax and GELU compute in float between two conversions,
    because no int16 kernel for them is both exact and available in every runtime: tflite-runtime lacks RSQRT and GELU
    in int16, and in LiteRT they are off by tens of steps; SOFTMAX in int16 gives a masked position at least exp(-10),
    which adds up over a context.
    """

    def __init__(
        self, subgraph: Subgraph, encodings: Mapping[str, Encoding], weights: TfliteWeights, eps: float
    ) -> None:
        """Start without operators.

        Args:
            subgraph: an empty one.
            encodings: one for every result and input.
            weights: the weights of the file.
            eps: of the norms.
        """
        self._graph = subgraph
        self._encodings = encodings
        self._weights = weights
        self._eps = eps

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

    def normalize(self, x: Tensor, width: int, name: str) -> Tensor:
        return self._emit("QUANTIZE", [self._normalized(x, name, self._eps)], name, x.shape)

    def _normalized(self, x: Tensor, name: str, eps: float) -> Tensor:
        """`x / rms(x)` in float."""
        assert x.encoding is not None
        # Scaling x by a factor and eps by its square changes nothing; a power of two is exact.
        factor = 2.0 ** math.floor(math.log2(_NORM_REACH / x.encoding.reach[1]))
        scaled = self._float("MUL", [self._dequantize(x, name), self._number(factor)], name + ".scaled")
        square = self._float("MUL", [scaled, scaled], name + ".square")
        mean = self._graph.result(name + ".mean", "f32", [*x.shape[:-1], 1])
        axis = self._integers("axis_width", [WIDTH])
        self._graph.operate("MEAN", [square, axis], [mean], "ReducerOptions", {"keepDims": True})
        shifted = self._float("ADD", [mean, self._number(eps * factor * factor)], name + ".shifted")
        inverse = self._float("RSQRT", [shifted], name + ".inverse")
        return self._float("MUL", [scaled, inverse], name + ".normal")

    def add(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        return self._emit("ADD", [a, b], name, a.shape, None, "AddOptions", potScaleInt16=False)

    def multiply(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        return self._emit("MUL", [a, b], name, a.shape, None, "MulOptions")

    def swap_halves(self, x: Tensor, half: int) -> Tensor:
        first, last = (self._slice(x, WIDTH, at, half) for at in (0, half))
        return self._beside(last, first, f"{x.index}.swapped")

    def _beside(self, first: Tensor, last: Tensor, name: str) -> Tensor:
        """Two tensors of one encoding, concatenated along the width."""
        shape = [*first.shape[:-1], first.shape[-1] + last.shape[-1]]
        parts = [first, last]
        return self._emit("CONCATENATION", parts, name, shape, last.encoding, "ConcatenationOptions", axis=WIDTH)

    def gelu(self, x: Tensor, name: str) -> Tensor:
        return self._gelu(x, name, approximate=True)

    def exact_gelu(self, x: Tensor, name: str) -> Tensor:
        return self._gelu(x, name, approximate=False)

    def _gelu(self, x: Tensor, name: str, *, approximate: bool) -> Tensor:
        result = self._graph.result(name + ".float", "f32", x.shape)
        options = {"approximate": approximate}
        self._graph.operate("GELU", [self._dequantize(x, name)], [result], "GeluOptions", options)
        return self._emit("QUANTIZE", [result], name, x.shape)

    def sigmoid(self, x: Tensor, name: str) -> Tensor:
        return self._emit("LOGISTIC", [x], name, x.shape)

    def join(self, parts: list[Tensor], name: str) -> Tensor:
        shape = [*parts[0].shape[:-1], sum(part.shape[-1] for part in parts)]
        return self._emit("CONCATENATION", parts, name, shape, None, "ConcatenationOptions", axis=WIDTH)

    def scores(self, query: Tensor, keys: Tensor, name: str) -> Tensor:
        shape = [*query.shape[:-1], keys.shape[ROWS]]
        return self._emit("BATCH_MATMUL", [query, keys], name, shape, None, "BatchMatMulOptions", adjY=True)

    def softmax(self, x: Tensor, name: str) -> Tensor:
        weights = self._graph.result(name + ".float", "f32", x.shape)
        self._graph.operate("SOFTMAX", [self._dequantize(x, name)], [weights], "SoftmaxOptions", {"beta": 1.0})
        return self._emit("QUANTIZE", [weights], name, x.shape)

    def attend(self, weights: Tensor, values: Tensor, name: str) -> Tensor:
        shape = [*weights.shape[:-1], values.shape[WIDTH]]
        return self._emit("BATCH_MATMUL", [weights, values], name, shape, None, "BatchMatMulOptions")

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
        result = self._graph.result(name, element_of(encoding), shape, encoding)
        self._graph.operate(operator, inputs, [result], kind, options)
        return result

    def _reshape(self, x: Tensor, shape: Sequence[int], name: str) -> Tensor:
        shape_tensor = self._integers(_named("shape", shape), shape)
        return self._emit("RESHAPE", [x, shape_tensor], name, shape, x.encoding, "ReshapeOptions", newShape=list(shape))

    def _dequantize(self, x: Tensor, name: str) -> Tensor:
        result = self._graph.result(name + ".real", "f32", x.shape)
        self._graph.operate("DEQUANTIZE", [x], [result])
        return result

    def _slice(self, x: Tensor, axis: int, first: int, length: int) -> Tensor:
        """Consecutive elements along an axis."""
        shape, start = [*x.shape], [0] * len(x.shape)
        shape[axis], start[axis] = length, first
        begin, size = self._integers(_named("begin", start), start), self._integers(_named("shape", shape), shape)
        return self._emit("SLICE", [x, begin, size], "part", shape, x.encoding, "SliceOptions")

    def _float(self, operator: str, inputs: Sequence[Tensor], name: str) -> Tensor:
        kind = {"MUL": "MulOptions", "ADD": "AddOptions"}.get(operator)
        result = self._graph.result(name, "f32", inputs[0].shape)
        self._graph.operate(operator, inputs, [result], kind)
        return result

    def _integers(self, key: str, values: Sequence[int]) -> Tensor:
        return self._graph.constant(key, "i32", [len(values)], lambda: np.array(values, np.int32))

    def _number(self, value: float) -> Tensor:
        return self._graph.constant(f"number_{value!r}", "f32", [1], lambda: np.array([value], np.float32))


def _named(kind: str, values: Sequence[int]) -> str:
    return f"{kind}_" + "_".join(map(str, values))


def element_of(encoding: Encoding) -> ElementType:
    """The type of the integers of an activation."""
    if encoding.dtype in ("s8", "s16"):
        return encoding.dtype
    raise ValueError(f"encoding: got {encoding.dtype}; expected s8 or s16, which the kernels support")
