"""Nodes and constants of a quantized ONNX graph, under construction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from quant import DTYPES, Encoding

QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A dequantized tensor of the graph, and the encoding of its integers."""

    name: str
    encoding: Encoding


def parameter_names(encoding: Encoding) -> tuple[str, str]:
    """Names of the constants of an encoding: short ones, since thousands of nodes repeat them."""
    return f"s{np.float32(encoding.scale)!s}", f"{encoding.dtype}_{encoding.zero_point}"


class QdqNodes:
    """Writes operations between a DequantizeLinear and a QuantizeLinear. Each constant is stored once.

    Attributes:
        nodes: so far, in order.
        quantized: encodings of the integers of results so far, by name, in order.
    """

    def __init__(self, encodings: Mapping[str, Encoding]) -> None:
        """Start without nodes.

        Args:
            encodings: one for every result.
        """
        self.nodes: list[onnx.NodeProto] = []
        self.quantized: dict[str, Encoding] = {}
        self._encodings = encodings
        self._uses: Counter[str] = Counter()
        self._constants: dict[str, onnx.TensorProto] = {}
        self._dequantized: set[str] = set()

    @property
    def constants(self) -> list[onnx.TensorProto]:
        """The constants so far."""
        return [*self._constants.values()]

    def emit(
        self, op: str, inputs: Sequence[str], name: str, encoding: Encoding | None = None, **attributes: Any
    ) -> Tensor:
        """Write an operation and quantize its result: in `encoding`, or in that of the result's name."""
        unique = self.unique(name)
        self.node(op, inputs, [unique + "_f"], **attributes)
        return self.requantize(unique + "_f", unique, encoding or self._encodings[name])

    def requantize(self, source: str, name: str, encoding: Encoding) -> Tensor:
        """Quantize a float and dequantize it again."""
        self.quantize(source, name + "_q", encoding)
        self.quantized[name + "_q"] = encoding
        return self.dequantize(name + "_q", name, encoding)

    def quantize(self, source: str, target: str, encoding: Encoding) -> None:
        """Write the integers of a float under the name `target`."""
        self.node("QuantizeLinear", [source, *self._parameters(encoding)], [target])

    def dequantize(self, source: str, target: str, encoding: Encoding) -> Tensor:
        """Write the float of integers under the name `target`."""
        self.node("DequantizeLinear", [source, *self._parameters(encoding)], [target])
        return Tensor(target, encoding)

    def node(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        """Write a node as it is. Only operations have names: those of all nodes would be a third of the file."""
        name = None if op in QUANTIZERS else outputs[0] + "_node"
        self.nodes.append(helper.make_node(op, inputs, outputs, name=name, **attributes))

    def unique(self, name: str) -> str:
        """The name, numbered if it was used before."""
        self._uses[name] += 1
        return name if self._uses[name] == 1 else f"{name}.{self._uses[name]}"

    def dequantize_once(self, constant: str, encoding: Encoding) -> str:
        """The name of a constant's float; all uses share it."""
        target = constant + "_dq"
        if constant not in self._dequantized:
            self._dequantized.add(constant)
            self.dequantize(constant, target, encoding)
        return target

    def zeros(self, dtype: int, shape: list[int]) -> str:
        """The name of a constant of zeros."""
        name = f"zeros_{TensorProto.DataType.Name(dtype).lower()}_" + "_".join(map(str, shape))
        if name not in self._constants:
            self._constants[name] = helper.make_tensor(name, dtype, shape, np.zeros(shape, np.int8))
        return name

    def constant(self, name: str, value: np.ndarray[Any, Any]) -> str:
        """Store a constant under a name that says its value; returns the name."""
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(value, name)
        return name

    def _parameters(self, encoding: Encoding) -> tuple[str, str]:
        scale, zero = parameter_names(encoding)
        return (
            self.constant(scale, np.array(encoding.scale, np.float32)),
            self.constant(zero, np.array(encoding.zero_point, DTYPES[encoding.dtype])),
        )
