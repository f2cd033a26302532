"""Nodes and constants of an ONNX graph for the CPU, under construction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgekv.bundle import Extent
from quant import DTYPES, Encoding

OPSET = 23  # the first with RMSNormalization
IR_VERSION = 11

_CONTRIB = "com.microsoft"
_CONTRIB_OPERATIONS = frozenset(
    {
        "DynamicQuantizeMatMul",
        "FusedMatMul",
        "GroupQueryAttention",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "QMoE",
        "QuickGelu",
        "RotaryEmbedding",
        "SkipSimplifiedLayerNormalization",
    }
)
"""ONNX Runtime's own. ONNX has a RotaryEmbedding too, which reads other inputs."""
_MAX_NAMED = 16  # elements of a constant whose name says its value


class Nodes:
    """Writes nodes in the order in which they run. Equal constants are stored once."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._uses: Counter[str] = Counter()

    # ------------------------------------------------------------------ nodes

    def add(self, op: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Write a node with one result; returns the result's name, which is `name`, numbered if it was used before."""
        result = self.unique(name)
        self.write(op, inputs, [result], **attributes)
        return result

    def write(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        """Write a node whose results have these names; an output that is not wanted has an empty one."""
        name = next(output for output in outputs if output) + "_node"
        domain = _CONTRIB if op in _CONTRIB_OPERATIONS else ""
        self.nodes.append(helper.make_node(op, inputs, outputs, name=name, domain=domain, **attributes))

    def unique(self, name: str) -> str:
        """The name, numbered if it was used before."""
        self._uses[name] += 1
        return name if self._uses[name] == 1 else f"{name}.{self._uses[name]}"

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        """With another shape: -1 for a size that follows from the others, 0 for one that stays."""
        return self.add("Reshape", [x, self.integers(shape)], x + ".reshaped")

    def transpose(self, x: str, *axes: int) -> str:
        """Transpose."""
        return self.add("Transpose", [x], x + ".transposed", perm=axes)

    def split(self, x: str, sizes: Sequence[int], axis: int, outputs: Sequence[str] = ()) -> list[str]:
        """Adjacent slices along an axis, under these names if they are given."""
        names = [*outputs] or [self.unique(f"{x}.part") for _ in sizes]
        if len(sizes) == 1 and not outputs:
            return [x]
        self.write("Split", [x, self.integers(sizes)], names, axis=axis)
        return names

    @contextmanager
    def branch(self) -> Iterator[list[onnx.NodeProto]]:
        """Write nodes into a branch of `either` meanwhile; constants stay those of the whole graph."""
        outer, self.nodes = self.nodes, []
        try:
            yield self.nodes
        finally:
            self.nodes = outer

    def either(self, condition: str, taken: Sequence[onnx.NodeProto], result: str, otherwise: str, name: str) -> str:
        """The `result` of the nodes of a branch if the condition, of one element, is true; else another tensor.

        Only one of both is computed.
        """
        chosen = self.unique(name)
        kept = helper.make_node("Identity", [otherwise], [f"{chosen}.else"], name=f"{chosen}.else_node")
        branches = {"then_branch": (taken, result), "else_branch": ([kept], f"{chosen}.else")}
        graphs = {
            side: helper.make_graph(nodes, f"{chosen}.{side}", [], [helper.make_empty_tensor_value_info(output)])
            for side, (nodes, output) in branches.items()
        }
        self.write("If", [condition], [chosen], **graphs)
        return chosen

    def quantize(self, x: str, encodings: Sequence[Encoding], name: str) -> str:
        """The integers of a float, with one encoding, or with one for each element of the first axis."""
        return self.add("QuantizeLinear", [x, *self._parameters(encodings)], name, **_axis(encodings))

    def dequantize(self, x: str, encodings: Sequence[Encoding], name: str) -> str:
        """The floats of integers; see `quantize`."""
        return self.add("DequantizeLinear", [x, *self._parameters(encodings)], name, **_axis(encodings))

    # ------------------------------------------------------------------ constants

    def constant(self, value: NDArray[Any], name: str | None = None) -> str:
        """Store a constant; without a name it has one that says its value."""
        if name is None:
            assert value.size <= _MAX_NAMED, "a constant of this size needs a name"
            name = f"{value.dtype}_{'x'.join(map(str, value.shape))}_" + "_".join(map(repr, value.ravel().tolist()))
        if name not in self._initializers:
            self._initializers[name] = numpy_helper.from_array(value, name)
        return name

    def integers(self, values: Sequence[int]) -> str:
        """A constant of sizes or axes, `[len(values)]`."""
        value = np.array(values, np.int64)
        return self.constant(value, "int64_" + "_".join(map(str, values)))

    def number(self, value: float, dtype: type[Any] = np.float32) -> str:
        """A constant scalar."""
        return self.constant(np.array(value, dtype))

    def external(self, name: str, element: int, shape: Sequence[int], file: str, extent: Extent) -> str:
        """A constant that stays in a file."""
        if name not in self._initializers:
            proto = TensorProto(name=name, data_type=element, dims=shape, data_location=TensorProto.EXTERNAL)
            for field, value in (("location", file), ("offset", extent.offset), ("length", extent.bytes)):
                proto.external_data.add(key=field, value=str(value))
            self._initializers[name] = proto
        return name

    def _parameters(self, encodings: Sequence[Encoding]) -> tuple[str, str]:
        if len({*encodings}) == 1:
            encoding = encodings[0]
            zero = np.array(encoding.zero_point, DTYPES[encoding.dtype])
            return self.number(encoding.scale), self.constant(zero)
        scales = np.array([encoding.scale for encoding in encodings], np.float32)
        zeros = np.array([encoding.zero_point for encoding in encodings], DTYPES[encodings[0].dtype])
        names = ["_".join(map(repr, array.tolist())) for array in (scales, zeros)]
        return self.constant(scales, f"scales_{names[0]}"), self.constant(zeros, f"zeros_{zeros.dtype}_{names[1]}")

    # ------------------------------------------------------------------ the model

    def model(
        self, name: str, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]
    ) -> onnx.ModelProto:
        """The model, with the constants that its nodes read."""
        read = {*_read(self.nodes)}
        constants = [constant for constant in self._initializers.values() if constant.name in read]
        graph = helper.make_graph(self.nodes, name, inputs, outputs, constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(_CONTRIB, 1)]
        model: onnx.ModelProto = helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="edgekv"
        )
        return model


def _read(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """The tensors that nodes read, and those of their branches."""
    for node in nodes:
        yield from node.input
        for attribute in node.attribute:
            yield from _read(attribute.g.node)


def _axis(encodings: Sequence[Encoding]) -> dict[str, int]:
    return {"axis": 0} if len({*encodings}) > 1 else {}
