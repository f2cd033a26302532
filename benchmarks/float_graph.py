"""The decoder as a plain float32 ONNX graph, for timing against the CPU engine's integers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgekv.graphs.decoder import Ops, decoder_layer, logits
from edgekv.kv import KvTensor
from edgekv.spec import ROPE_SUFFIXES, LoraTarget, mask_name, rope_inputs
from exporters.graphs.qdq import IR_VERSION, OPSET
from exporters.quantize.reference import Tensors


class FloatOps(Ops[str]):
    """Writes the decode step down: one new token, all S-1 past rows, keys as rows; a value is a result's name."""

    def __init__(self, tensors: Tensors, context: int) -> None:
        """Start with the inputs that every layer needs; S is `context`."""
        self._tensors = tensors
        self._spec = tensors.spec
        self._context = context
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._inputs.append(helper.make_tensor_value_info("input_ids", TensorProto.INT32, [1, 1]))
        self._mask = self._input(mask_name(None), [1, 1, 1, context])
        self._rotations = [
            (self._input(cos, [1, 1, 1, rope.width // 2]), self._input(sin, [1, 1, 1, rope.width // 2]))
            for rope, (cos, sin) in zip(self._spec.ropes, map(rope_inputs, ROPE_SUFFIXES), strict=False)
        ]

    def embed(self, key: str) -> str:
        """The row of `input_ids`, `[1, 1, 1, hidden]`."""
        row = self._emit("Gather", [self._constant(key, self._tensors.tensor(key)), "input_ids"], axis=0)
        return self._emit("Reshape", [row, self._constant("shape_of_row", np.array([1, 1, 1, -1]))])

    def linear(
        self, x: str, weight: str, name: str, *, bias: str | None = None, head: int | None = None, gain: float = 1.0
    ) -> str:
        width = self._spec.head_dim
        rows = slice(None) if head is None else slice(head * width, (head + 1) * width)
        part = "" if head is None else f".h{head}"
        matrix = np.ascontiguousarray(self._tensors.tensor(weight)[rows].T) * np.float32(gain)
        product = self._emit("MatMul", [x, self._constant(f"{weight}{part}.turned", matrix)])
        if bias is None:
            return product
        added = self._tensors.tensor(bias)[rows] * np.float32(gain)
        return self._emit("Add", [product, self._constant(bias + part, added)])

    def adapt(self, y: str, x: str, layer: int, target: LoraTarget, name: str, *, head: int | None = None) -> str:
        return y

    def rms_norm(self, x: str, weight: str, name: str, *, gain: float = 1.0) -> str:
        gamma = self._constant(weight, self._tensors.tensor(weight) * np.float32(gain))
        return self._emit("RMSNormalization", [x, gamma], axis=-1, epsilon=self._spec.eps)

    def add(self, a: str, b: str, name: str) -> str:
        return self._emit("Add", [a, b])

    def subtract(self, a: str, b: str, name: str) -> str:
        return self._emit("Sub", [a, b])

    def multiply(self, a: str, b: str, name: str) -> str:
        return self._emit("Mul", [a, b])

    def scale(self, x: str, factor: float, name: str) -> str:
        return self._emit("Mul", [x, self._constant(f"factor_{factor!r}", np.array(factor, np.float32))])

    def sigmoid(self, x: str, name: str) -> str:
        return self._emit("Sigmoid", [x])

    def tanh(self, x: str, name: str) -> str:
        return self._emit("Tanh", [x])

    def gelu(self, x: str, name: str) -> str:
        return self._emit("Gelu", [x], approximate="tanh")

    def split(self, x: str, widths: Sequence[int]) -> list[str]:
        names = [f"{x}.{part}" for part in range(len(widths))]
        sizes = self._constant("widths_" + "_".join(map(str, widths)), np.array(widths))
        self._nodes.append(helper.make_node("Split", [x, sizes], names, axis=-1))
        return names

    def join(self, parts: list[str], name: str) -> str:
        return self._emit("Concat", parts, axis=-1)

    def rotation(self, layer: int) -> tuple[str, str]:
        rope = self._spec.rope_of(layer)
        assert rope is not None, "the decoder asks for rotated layers only"
        return self._rotations[self._spec.ropes.index(rope)]

    def append_to_cache(self, new: str, tensor: KvTensor) -> str:
        past = self._input(tensor.past, [1, 1, self._context - 1, self._spec.head_dim])
        self._nodes.append(helper.make_node("Identity", [new], [tensor.new]))
        self._output(tensor.new, [1, 1, 1, self._spec.head_dim])
        return self._emit("Concat", [past, new], axis=2)

    def scores(self, query: str, keys: str, name: str) -> str:
        return self._emit("MatMul", [query, self._emit("Transpose", [keys], perm=[0, 1, 3, 2])])

    def masked(self, scores: str, layer: int, name: str) -> str:
        return self._emit("Add", [scores, self._mask])

    def softmax(self, x: str, name: str) -> str:
        return self._emit("Softmax", [x], axis=-1)

    def attend(self, weights: str, values: str, name: str) -> str:
        return self._emit("MatMul", [weights, values])

    def finish(self, end: str) -> onnx.ModelProto:
        """The model, with `end` as its output `logits`, `[1, 1, V]`."""
        shape = self._constant("shape_of_logits", np.array([1, 1, self._spec.vocab]))
        self._nodes.append(helper.make_node("Reshape", [end, shape], ["logits"]))
        self._output("logits", [1, 1, self._spec.vocab])
        graph = helper.make_graph(self._nodes, "float32", self._inputs, self._outputs, [*self._constants.values()])
        opsets = [helper.make_opsetid("", OPSET)]
        model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        return model

    def _emit(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"{op.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, inputs, [name], name=name + "_node", **attributes))
        return name

    def _constant(self, name: str, value: NDArray[Any]) -> str:
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(value, name)
        return name

    def _input(self, name: str, shape: list[int]) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    def _output(self, name: str, shape: list[int]) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))


def write_float_graph(tensors: Tensors, context: int, path: Path) -> None:
    """Write the decode step in a context of S tokens, with its weights in a file beside it."""
    ops = FloatOps(tensors, context)
    hidden = ops.embed("model.embed_tokens.weight")
    for layer in range(tensors.spec.layers):
        hidden = decoder_layer(ops, tensors.spec, layer, hidden)
    model = ops.finish(logits(ops, tensors.spec, tensors.head_key, hidden))
    onnx.save(model, path, save_as_external_data=True, location=path.name + ".data", convert_attribute=False)
