"""Builds a static ONNX graph of the decoder in which every result is quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgekv.spec import (
    EMBEDDING,
    LOGITS,
    LOGITS_INDEX,
    DecoderInterface,
    DecoderSpec,
    GraphRecord,
    KvTensor,
    LoraGroup,
    LoraTarget,
    PartRecord,
    Port,
    lora_a,
    lora_added,
    lora_b,
    lora_group,
    lora_reach,
)
from exporters.graphs.nodes import QdqNodes, Tensor
from exporters.quantize.weights import WeightStore
from quant import WEIGHT_TYPES, Encoding

OPSET = 23  # the first with RMSNormalization, which the HTP runs as one integer operation
IR_VERSION = 11

_ROWS, _WIDTH = 2, -1  # axes of [1, 1, rows, width]
_TRANSPOSED = [0, 1, 3, 2]


class QdqOps:
    """A part of a graph for AR new tokens in a context of S, under construction.

    Every operation reads dequantized tensors, and its result is quantized immediately in its encoding. The HTP compiler
    turns this pattern into integer operations.
    """

    def __init__(
        self,
        graph: GraphRecord,
        part: PartRecord,
        decoder: DecoderInterface,
        spec: DecoderSpec,
        encodings: Mapping[str, Encoding],
        store: WeightStore,
    ) -> None:
        """Start with the inputs that all of its layers share.

        Args:
            graph: AR, context and role.
            part: the part of the graph to build.
            decoder: gives the inputs and outputs.
            spec: the decoder.
            encodings: one for every result and input.
            store: of the weights.
        """
        self._part = part
        self._decoder = decoder
        self._ports = decoder.graph(graph, part)
        self._spec = spec
        self._encodings = encodings
        self._store = store
        self._nodes = QdqNodes(encodings)
        self._stored: dict[str, None] = {}
        self._transposed: dict[str, Tensor] = {}
        self._adapted: dict[str, Tensor] = {}
        self._entry = self._embed() if part.embeds else self._read(self._ports.entry)
        shared = (port for port in self._ports.inputs if port.kind in ("mask", "cos", "sin"))
        self._shared = {port.name: self._read(port) for port in shared}

    # ------------------------------------------------------------------ the operations of a decoder

    @property
    def entry(self) -> Tensor:
        """The hidden state before the part's first layer, `[1, 1, AR, hidden]`, or the rows that a head reads."""
        return self._entry

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
        product = "MatMul", [x.name, self._matrix(weight, head, gain)]
        if bias is None:
            return self._nodes.emit(*product, name)
        # A separate Add works with any weight type. An int32 bias needs a Gemm, which the HTP refuses for LPBQ; its
        # mean error is 0.25 steps of the result, that of the Add 0.37.
        added = self._weight(*self._store.tensor(bias, head=head), gain)
        return self._nodes.emit("Add", [self._nodes.emit(*product, name + ".unbiased").name, added], name)

    def adapt(
        self, y: Tensor, x: Tensor, layer: int, target: LoraTarget, name: str, *, head: int | None = None
    ) -> Tensor:
        if self._decoder.lora is None or target not in self._decoder.lora:
            return y
        reduced = self._reduced(x, layer, lora_group(target))
        b = self._read(self._ports[lora_b(layer, target, head)])
        added = self._nodes.emit("MatMul", [reduced.name, b.name], lora_added(layer, target))
        # The sum has the encoding of y: adding 0 gives y again, on the HTP too.
        return self._nodes.emit("Add", [y.name, added.name], name + ".adapted", y.encoding)

    def _reduced(self, x: Tensor, layer: int, group: LoraGroup) -> Tensor:
        """`x A`, for all projections of a group."""
        name = lora_reach(layer, group)
        if name not in self._adapted:
            a = self._read(self._ports[lora_a(layer, group)])
            self._adapted[name] = self._nodes.emit("MatMul", [x.name, a.name], name)
        return self._adapted[name]

    def rms_norm(self, x: Tensor, weight: str, name: str, *, gain: float = 1.0) -> Tensor:
        gamma = self._weight(*self._store.tensor(weight), gain)
        return self._nodes.emit("RMSNormalization", [x.name, gamma], name, axis=-1, epsilon=self._spec.eps)

    def add(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Add", [a.name, b.name], name)

    def subtract(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Sub", [a.name, b.name], name)

    def multiply(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Mul", [a.name, b.name], name)

    def scale(self, x: Tensor, factor: float, name: str) -> Tensor:
        encoding = Encoding.asymmetric(0.0, factor, x.encoding.dtype)
        integer = self._nodes.constant(f"factor_{factor!r}", encoding.quantize(np.array(factor)))
        return self._nodes.emit("Mul", [x.name, self._nodes.dequantize_once(integer, encoding)], name)

    def sigmoid(self, x: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Sigmoid", [x.name], name)

    def tanh(self, x: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Tanh", [x.name], name)

    def gelu(self, x: Tensor, name: str) -> Tensor:
        # One node on the HTP, with a mean error of 8 steps of 65536; six nodes with a sigmoid have 0.5. Neither matters
        # next to int8 weights: the logits of HTP and CPU agree to 47 dB with this one.
        return self._nodes.emit("Gelu", [x.name], name, approximate="tanh")

    def split(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        names = [self._nodes.unique(f"{x.name}.part") for _ in widths]
        floats = [name + "_f" for name in names]
        sizes = self._nodes.constant("widths_" + "_".join(map(str, widths)), np.array(widths, np.int64))
        self._nodes.node("Split", [x.name, sizes], floats, axis=_WIDTH)
        return [self._nodes.requantize(f, n, x.encoding) for f, n in zip(floats, names, strict=True)]

    def slice(self, x: Tensor, first: int, width: int) -> Tensor:
        bounds = (first, first + width, _WIDTH)
        begin, end, axis = (self._nodes.constant(f"at_{at}", np.array([at], np.int64)) for at in bounds)
        return self._nodes.emit("Slice", [x.name, begin, end, axis], x.name + ".part", x.encoding)

    def join(self, parts: list[Tensor], name: str) -> Tensor:
        return self._nodes.emit("Concat", [part.name for part in parts], name, axis=_WIDTH)

    def rotation(self, layer: int) -> tuple[Tensor, Tensor]:
        rotary = self._decoder.rotary_of(layer)
        assert rotary is not None, "the decoder rotates only layers that have an embedding"
        cos, sin = rotary.names
        return self._shared[cos], self._shared[sin]

    def append_to_cache(self, new: Tensor, tensor: KvTensor) -> Tensor:
        encoding = self._encodings[tensor.past]
        is_columns = tensor.kind == "key" and self._keys_are_columns
        if is_columns:
            new = self._nodes.emit("Transpose", [new.name], new.name + ".t", new.encoding, perm=_TRANSPOSED)
        past = self._read(self._ports[tensor.past])
        self._nodes.quantize(new.name, tensor.new, encoding)
        added = self._nodes.dequantize(tensor.new, tensor.new + "_dq", encoding)
        name = f"{tensor.kind}_{tensor.layer}_h{tensor.head}"
        return self._nodes.emit("Concat", [past.name, added.name], name, encoding, axis=_WIDTH if is_columns else _ROWS)

    def scores(self, query: Tensor, keys: Tensor, name: str) -> Tensor:
        if self._keys_are_columns:
            return self._nodes.emit("MatMul", [query.name, keys.name], name)
        if keys.name not in self._transposed:  # the query heads of a key head share it
            transposed = self._nodes.emit("Transpose", [keys.name], keys.name + ".t", keys.encoding, perm=_TRANSPOSED)
            self._transposed[keys.name] = transposed
        return self._nodes.emit("MatMul", [query.name, self._transposed[keys.name].name], name)

    def masked(self, scores: Tensor, layer: int, name: str) -> Tensor:
        return self._nodes.emit("Add", [scores.name, self._shared[self._decoder.mask(layer)].name], name)

    def softmax(self, x: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Softmax", [x.name], name, axis=-1)

    def attend(self, weights: Tensor, values: Tensor, name: str) -> Tensor:
        return self._nodes.emit("MatMul", [weights.name, values.name], name)

    # ------------------------------------------------------------------ entry and exit of a part

    def _embed(self) -> Tensor:
        """The rows of the embedding table for `input_ids`."""
        ids = self._ports.entry
        stored, encoding = self._store.tensor(EMBEDDING)
        rows = self._nodes.emit("Gather", [self._weight(stored, encoding), ids.name], "embedding", encoding, axis=0)
        shape = self._nodes.constant("shape_1_1_ar", np.array([1, *ids.shape, -1], np.int64))
        return self._nodes.emit("Reshape", [rows.name, shape], "embedding", encoding)

    def select(self, hidden: Tensor) -> Tensor:
        """The row of `hidden` that the input `logits_index` selects, `[1, 1, 1, hidden]`."""
        return self._nodes.emit("Gather", [hidden.name, LOGITS_INDEX], "selected", hidden.encoding, axis=_ROWS)

    def give_logits(self, logits: Tensor) -> None:
        """Make them the last output, `[1, rows, vocab]`."""
        shape = self._nodes.constant("shape_logits", np.array(self._ports.exit.shape, np.int64))
        self._nodes.node("Reshape", [logits.name, shape], ["logits_f"])
        self._nodes.quantize("logits_f", LOGITS, logits.encoding)

    def give_residual(self, hidden: Tensor) -> None:
        """Make the integers of the newest result the last output."""
        quantize, dequantize = self._nodes.nodes[-2:]
        assert dequantize.output[0] == hidden.name, "something was computed after it"
        quantize.output[0] = self._part.exit
        self._nodes.nodes.pop()

    def finish(self) -> onnx.ModelProto:
        """The model. Flush the store first."""
        stored = [self._store.initializer(each) for each in self._stored]
        constants = [*self._nodes.constants, *stored]
        inputs, outputs = ([_value_info(port) for port in ports] for ports in (self._ports.inputs, self._ports.outputs))
        graph = helper.make_graph(self._nodes.nodes, self._part.name, inputs, outputs, constants)
        model: onnx.ModelProto = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="edgekv"
        )
        return model

    # ------------------------------------------------------------------ inputs and constants

    @property
    def _keys_are_columns(self) -> bool:
        return self._decoder.cache.key_layout == "columns"

    def _read(self, port: Port) -> Tensor:
        """An input, dequantized."""
        assert port.encoding is not None, "token ids are gathered"
        return self._nodes.dequantize(port.name, port.name + "_dq", self._encodings[port.encoding])

    def _weight(self, stored: str, encoding: Encoding, gain: float = 1.0) -> str:
        """A stored tensor with one encoding, times a constant, dequantized once."""
        self._stored[stored] = None
        return self._nodes.dequantize_once(stored, encoding.times(gain))

    def _matrix(self, key: str, head: int | None, gain: float) -> str:
        """A stored matrix, dequantized with a scale for each column, or for each block of a column.

        Block scales are themselves dequantized: integers times the column's scale. The HTP multiplies no other form of
        block quantization as integers. Zero points are explicit for 4 bits: without them the HTP silently reads other
        integers.
        """
        integers, scales, block_scales, dtype, columns, blocks = self._store.matrix(key, head=head, gain=gain)
        self._stored[integers] = self._stored[scales] = None
        target, kind = integers + "_dq", WEIGHT_TYPES[dtype]
        if block_scales is None:
            zeros = [self._nodes.zeros(TensorProto.INT4, [columns])] if kind.is_packed else []
            self._nodes.node("DequantizeLinear", [integers, scales, *zeros], [target], axis=1)
            return target
        self._stored[block_scales] = None
        steps = block_scales + "_dq"
        zeros = [
            self._nodes.zeros(TensorProto.UINT8, [columns]),
            self._nodes.zeros(TensorProto.INT4, [blocks, columns]),
        ]
        self._nodes.node("DequantizeLinear", [block_scales, scales, zeros[0]], [steps], axis=1)
        self._nodes.node("DequantizeLinear", [integers, steps, zeros[1]], [target], axis=0, block_size=kind.block)
        return target


def _value_info(port: Port) -> onnx.ValueInfoProto:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(port.dtype))
    value: onnx.ValueInfoProto = helper.make_tensor_value_info(port.name, element, port.shape)
    return value
