"""The operations that graphs of decoders and of encoders share, each quantized as soon as it is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import TensorProto

from edgekv.graphs.delta_rule import signed_operand
from exporters.graphs.nodes import QdqNodes, Tensor
from exporters.graphs.weights import StoredWeights
from quant import WEIGHT_TYPES, Encoding

TRANSPOSED = [0, 1, 3, 2]
WIDTH = -1  # axis of [1, 1, rows, width]


class QdqBlocks:
    """A graph under construction; `BlockOps`.

    Every operation reads dequantized tensors, and its result is quantized immediately in its encoding. The HTP compiler
    turns this pattern into integer operations.
    """

    def __init__(self, encodings: Mapping[str, Encoding], weights: StoredWeights, width: int, eps: float) -> None:
        """Start without nodes.

        Args:
            encodings: one for every result and input.
            weights: of the graph.
            width: of the residual.
            eps: of the norms.
        """
        self._encodings = encodings
        self._weights = weights
        self._width = width
        self._eps = eps
        self._nodes = QdqNodes(encodings)
        self._stored: dict[str, None] = {}
        self._transposed: dict[str, Tensor] = {}
        self._columns: set[str] = set()  # keys that are stored so
        self._signed: dict[str, Tensor] = {}
        self._dequantized: set[str] = set()  # matrices

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
        matrix, is_turned = self._matrix(weight, head, gain)
        if is_turned:
            rows = self._reshape(x, x.name + ".rows", (-1, self._width))
            return self._nodes.emit("Gemm", [rows.name, matrix], name, transB=1)
        product = "MatMul", [x.name, matrix]
        if bias is None:
            return self._nodes.emit(*product, name)
        # A separate Add works with any weight type. An int32 bias needs a Gemm, which the HTP refuses for LPBQ; its
        # mean error is 0.25 steps of the result, that of the Add 0.37.
        added = self._weight(*self._weights.tensor(bias, head=head), gain)
        return self._nodes.emit("Add", [self._nodes.emit(*product, name + ".unbiased").name, added], name)

    def normalize(self, x: Tensor, width: int, name: str) -> Tensor:
        return self._normalized(x, width, name, self._eps)

    def _normalized(self, x: Tensor, width: int, name: str, eps: float) -> Tensor:
        one = Encoding.asymmetric(0.0, 1.0, "u16")
        integers = self._nodes.constant(f"ones_{width}", one.quantize(np.ones(width)))
        gamma = self._nodes.dequantize_once(integers, one)
        return self._nodes.emit("RMSNormalization", [x.name, gamma], name, axis=-1, epsilon=eps)

    def add(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Add", [a.name, b.name], name)

    def multiply(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Mul", [a.name, b.name], name)

    def split(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        names = [self._nodes.unique(f"{x.name}.part") for _ in widths]
        floats = [name + "_f" for name in names]
        sizes = self._nodes.constant("widths_" + "_".join(map(str, widths)), np.array(widths, np.int64))
        self._nodes.node("Split", [x.name, sizes], floats, axis=WIDTH)
        return [self._nodes.requantize(f, n, x.encoding) for f, n in zip(floats, names, strict=True)]

    def swap_halves(self, x: Tensor, half: int) -> Tensor:
        first, last = self.split(x, [half, half])
        return self._nodes.emit("Concat", [last.name, first.name], x.name + ".part", x.encoding, axis=WIDTH)

    def gelu(self, x: Tensor, name: str) -> Tensor:
        # One node on the HTP, with a mean error of 8 steps of 65536; six nodes with a sigmoid have 0.5. Neither matters
        # next to int8 weights: the logits of HTP and CPU agree to 47 dB with this one.
        return self._nodes.emit("Gelu", [x.name], name, approximate="tanh")

    def exact_gelu(self, x: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Gelu", [x.name], name)

    def sigmoid(self, x: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Sigmoid", [x.name], name)

    def join(self, parts: list[Tensor], name: str) -> Tensor:
        return self._nodes.emit("Concat", [part.name for part in parts], name, axis=WIDTH)

    def scores(self, query: Tensor, keys: Tensor, name: str) -> Tensor:
        keys = self._second_operand(keys)
        if keys.name in self._columns:
            return self._nodes.emit("MatMul", [query.name, keys.name], name)
        if keys.name not in self._transposed:  # the query heads of a key head share it
            transposed = self._nodes.emit("Transpose", [keys.name], keys.name + ".t", keys.encoding, perm=TRANSPOSED)
            self._transposed[keys.name] = transposed
        return self._nodes.emit("MatMul", [query.name, self._transposed[keys.name].name], name)

    def softmax(self, x: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Softmax", [x.name], name, axis=-1)

    def attend(self, weights: Tensor, values: Tensor, name: str) -> Tensor:
        return self._nodes.emit("MatMul", [weights.name, self._second_operand(values).name], name)

    def _second_operand(self, x: Tensor) -> Tensor:
        """The right side of a product of results: the HTP reads signed integers there, or 8 bits."""
        if x.encoding.dtype != "u16":
            return x
        if x.name not in self._signed:
            self._signed[x.name] = self._nodes.requantize(x.name, x.name + ".signed", signed_operand(x.encoding))
        return self._signed[x.name]

    def _reshape(self, x: Tensor, name: str, shape: Sequence[int]) -> Tensor:
        sizes = self._nodes.constant("shape_" + "_".join(map(str, shape)), np.array(shape, np.int64))
        return self._nodes.emit("Reshape", [x.name, sizes], name, x.encoding)

    def _weight(self, stored: str, encoding: Encoding, gain: float = 1.0) -> str:
        """A stored tensor with one encoding, times a constant, dequantized once."""
        self._stored[stored] = None
        return self._nodes.dequantize_once(stored, encoding.times(gain))

    def _matrix(self, key: str, head: int | None, gain: float) -> tuple[str, bool]:
        """A stored matrix, dequantized with a scale for each column, or for each block of a column.

        It is `[in, out]`, or `[out, in]` if that is how it is stored; the second value says so.

        Block scales are themselves dequantized: integers times the column's scale. The HTP multiplies no other form of
        block quantization as integers. Zero points are explicit for 4 bits: without them the HTP silently reads other
        integers.
        """
        stored = self._weights.matrix(key, head=head, gain=gain)
        integers, scales, block_scales, dtype, columns, blocks, by_outputs = stored
        self._stored[integers] = self._stored[scales] = None
        target, kind = integers + "_dq", WEIGHT_TYPES[dtype]
        if target in self._dequantized:
            return target, by_outputs
        self._dequantized.add(target)
        if block_scales is None:
            zeros = [self._nodes.zeros(TensorProto.INT4, [columns])] if kind.is_packed else []
            self._nodes.node("DequantizeLinear", [integers, scales, *zeros], [target], axis=0 if by_outputs else 1)
            return target, by_outputs
        self._stored[block_scales] = None
        steps = block_scales + "_dq"
        zeros = [
            self._nodes.zeros(TensorProto.UINT8, [columns]),
            self._nodes.zeros(TensorProto.INT4, [blocks, columns]),
        ]
        self._nodes.node("DequantizeLinear", [block_scales, scales, zeros[0]], [steps], axis=1)
        self._nodes.node("DequantizeLinear", [integers, steps, zeros[1]], [target], axis=0, block_size=kind.block)
        return target, False
