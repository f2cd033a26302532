"""Builds the decoder as a subgraph of a `.tflite` file."""

from __future__ import annotations

import itertools
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
from exporters.graphs.tflite.blocks import ROWS, WIDTH, TfliteBlocks, element_of
from exporters.graphs.tflite.flatbuffer import Subgraph, Tensor
from exporters.graphs.tflite.weights import TfliteWeights
from quant import Encoding


def _no_experts() -> UsageError:
    return UsageError(
        "--graph-format", got="tflite for a model with experts", expected="onnx", fix="Use --graph-format onnx."
    )


class TfliteOps(TfliteBlocks, Ops[Tensor]):
    """A subgraph for AR new tokens in a context of S, under construction."""

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
        super().__init__(subgraph, encodings, weights, spec.eps)
        self._decoder = decoder
        self._ports = decoder.graph(graph)
        self._spec = spec
        self._cached: dict[KvTensor, Tensor] = {}
        self._tables: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        self._entry = self._input(self._ports.entry)
        shared = (port for port in self._ports.inputs if port.kind in ("layer_inputs", "mask", "cos", "sin"))
        self._shared = {port.name: self._input(port) for port in shared}

    # ------------------------------------------------------------------ the operations of a decoder

    def embed(self, key: str, name: str) -> Tensor:
        """The embeddings of the tokens, `[1, 1, AR, hidden]`: the input, or rows of the table for `input_ids`."""
        if self._entry.encoding is not None:
            return self._entry
        table = self._weights.table(self._graph, key)
        shape = [*self._entry.shape, table.shape[1]]
        rows = self._emit("GATHER", [table, self._entry], name, shape, table.encoding, "GatherOptions", axis=0)
        return self._reshape(rows, [1, *shape], name)

    def delta_rule(self, spec: DecoderSpec, layer: int, x: Tensor) -> Tensor:
        assert spec.delta_rule is not None, "the layer has one"
        raise UsageError(
            "--graph-format",
            got=f"tflite for a model with {spec.delta_rule.noun}",
            expected="onnx",
            fix="Use --graph-format onnx.",
        )

    def adapt(
        self, y: Tensor, x: Tensor, layer: int, target: LoraTarget, name: str, *, head: int | None = None
    ) -> Tensor:
        return y

    def rms_norm(self, x: Tensor, weight: str, name: str, *, gain: float = 1.0) -> Tensor:
        normal = self._normalized(x, name, self._eps)
        weighted = self._float("MUL", [normal, self._weights.norm(self._graph, weight, gain=gain)], name + ".weighted")
        return self._emit("QUANTIZE", [weighted], name, x.shape)

    def scale_by(self, x: Tensor, weight: str, name: str) -> Tensor:
        return self.multiply(x, self._weights.table(self._graph, weight), name)

    def shift_by(self, x: Tensor, weight: str, name: str) -> Tensor:
        raise _no_experts()

    def chosen(self, x: Tensor, count: int, name: str) -> Tensor:
        raise _no_experts()

    def shares(self, x: Tensor, name: str) -> Tensor:
        raise _no_experts()

    def layer_input(self, layer: int) -> Tensor:
        width = self._spec.input_width
        return self.slice(self._shared[LAYER_INPUTS_PORT], layer * width, width)

    def subtract(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        return self._emit("SUB", [a, b], name, a.shape, None, "SubOptions", potScaleInt16=False)

    def scale(self, x: Tensor, factor: float, name: str) -> Tensor:
        encoding = Encoding.symmetric(factor, "s16")
        constant = self._graph.constant(
            f"factor_{factor!r}", "s16", [1], lambda: encoding.quantize(np.array([factor])), encoding=encoding
        )
        return self.multiply(x, constant, name)

    def tanh(self, x: Tensor, name: str) -> Tensor:
        return self._emit("TANH", [x], name, x.shape)

    def relu(self, x: Tensor, name: str) -> Tensor:
        return self._emit("RELU", [x], name, x.shape)

    def exp(self, x: Tensor, name: str) -> Tensor:
        return self._in_float("EXP", x, name)

    def complement(self, x: Tensor, of: float, name: str) -> Tensor:
        encoding = Encoding.symmetric(of, "s16")
        constant = self._graph.constant(
            f"minuend_{of!r}", "s16", [1], lambda: encoding.quantize(np.array([of])), encoding=encoding
        )
        return self._emit("SUB", [constant, x], name, x.shape, None, "SubOptions", potScaleInt16=False)

    def sqrt(self, x: Tensor, name: str) -> Tensor:
        return self._in_float("SQRT", x, name)

    def sign(self, x: Tensor, name: str) -> Tensor:
        return self._in_float("SIGN", x, name)

    def _in_float(self, operator: str, x: Tensor, name: str) -> Tensor:
        result = self._float(operator, [self._dequantize(x, name)], name + ".float")
        return self._emit("QUANTIZE", [result], name, x.shape)

    def split(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        starts = itertools.accumulate(widths, initial=0)
        return [self.slice(x, start, width) for start, width in zip(starts, widths, strict=False)]

    def slice(self, x: Tensor, first: int, width: int) -> Tensor:
        return self._slice(x, WIDTH, first, width)

    def rotation(self, layer: int, heads: int) -> tuple[Tensor, Tensor]:
        rotary = self._decoder.rotary_of(layer)
        assert rotary is not None, "the decoder rotates only layers that have an embedding"
        if rotary.names not in self._tables:
            cos, sin = (self._shared[name] for name in rotary.names)
            zero = self._graph.constant("zero", "s16", [1], lambda: np.zeros(1, np.int16), encoding=sin.encoding)
            options = {"potScaleInt16": False}
            # No kernel negates int16; equal scales make the difference exact.
            name = rotary.names[1] + ".negative"
            negative = self._emit("SUB", [zero, sin], name, sin.shape, sin.encoding, "SubOptions", **options)
            pairs = zip(rotary.names, ((cos, cos), (negative, sin)), strict=True)
            first, second = (self._beside(*pair, name + ".both") for name, pair in pairs)
            self._tables[rotary.names] = first, second
        return self._tables[rotary.names]

    def append_to_cache(self, new: Tensor, tensor: KvTensor) -> Tensor:
        encoding = self._encodings[tensor.past]
        past = self._input(self._ports[tensor.past])
        added = self._emit("QUANTIZE", [new], tensor.new, new.shape, encoding)
        self._graph.output(tensor.new, added)
        name = f"{tensor.kind}_{tensor.layer}_h{tensor.head}"
        shape = [1, 1, past.shape[ROWS] + new.shape[ROWS], new.shape[WIDTH]]
        rows = self._emit("CONCATENATION", [past, added], name, shape, encoding, "ConcatenationOptions", axis=ROWS)
        if encoding.dtype != "s16":
            # No kernel multiplies int16 by int8, so the same integers are widened.
            rows = self._emit("CAST", [rows], name + ".wide", shape, Encoding("s16", encoding.scale, 0))
        self._cached[tensor] = rows
        return rows

    def cached(self, tensor: KvTensor) -> Tensor:
        return self._cached[tensor]

    def tap(self, rows: Tensor, weight: str, tap: int, name: str) -> Tensor:
        assert self._spec.convolution is not None, "a layer has one"
        read = self._slice(rows, ROWS, tap, rows.shape[ROWS] - (self._spec.convolution.kernel - 1))
        return self.multiply(read, self._weights.tap(self._graph, weight, tap), name)

    def masked(self, scores: Tensor, layer: int, name: str) -> Tensor:
        return self.add(scores, self._shared[self._decoder.mask(layer)], name)

    # ------------------------------------------------------------------ exit of a graph

    def select(self, hidden: Tensor) -> Tensor:
        """The row of `hidden` that the input `logits_index` selects, `[1, 1, 1, hidden]`."""
        index = self._input(self._ports[LOGITS_INDEX])
        shape = [1, 1, 1, hidden.shape[WIDTH]]
        return self._emit("GATHER", [hidden, index], "selected", shape, hidden.encoding, "GatherOptions", axis=ROWS)

    def finish(self, logits: Tensor) -> None:
        """Make `logits` the last output, `[1, rows, V]`."""
        self._graph.output(LOGITS, self._reshape(logits, self._ports.exit.shape, LOGITS))

    def _input(self, port: Port) -> Tensor:
        if port.encoding is None:
            return self._graph.input(port.name, "i32", port.shape)
        encoding = self._encodings[port.encoding]
        return self._graph.input(port.name, element_of(encoding), port.shape, encoding)
