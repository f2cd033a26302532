"""Builds a static ONNX graph of the decoder in which every result is quantized."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from edgekv.graphs.decoder import folds_heads
from edgekv.graphs.delta_rule import (
    BY_STEP,
    SHARES,
    UNIT_EPS,
    DeltaOps,
    between_blocks,
    gives_rows_by_step,
    rows_after,
    unit_encoding,
)
from edgekv.kv import Sink
from edgekv.spec import (
    CHECKPOINT_TOKENS,
    CONV_ROWS,
    EMBEDDING_COLUMNS,
    EMBEDDING_STEPS,
    LAST_HIDDEN,
    LAYER_INPUTS_PORT,
    LOGITS,
    LOGITS_INDEX,
    TARGET_HIDDEN,
    DecoderInterface,
    DecoderSpec,
    GraphInterface,
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
from exporters.graphs.blocks import TRANSPOSED, WIDTH, QdqBlocks
from exporters.graphs.nodes import Tensor
from exporters.graphs.weights import StoredWeights
from quant import DTYPES, Dtype, Encoding

OPSET = 23  # the first with RMSNormalization, which the HTP runs as one integer operation
IR_VERSION = 11

_ROWS = 2  # axis of [1, 1, rows, width]
_UNSIGNED_ZERO = 32768
_BYTES = Encoding("s8", 1.0, 0)
_INTEGERS = Encoding("u16", 1.0, _UNSIGNED_ZERO)
# Names of integers of results without a row for each token, or that depend on steps; of parts of others; of signs.
_NOT_TRACED = re.compile(
    rf"{BY_STEP}|\.(scores|masked|stored)\.|^probabilities|^(key|value|conv|delta_key|delta_value|decay)_\d|^past_|^position_ids_|\.(t|part|rows|signed)(\.\d+)?_q$|^embedding\.(2|integers|wide|columns|scales)_q$|\.sign_q$"
)
_COUNTS = Encoding("u16", 1 / 32, 0)
"""Of numbers of experts, and half numbers between them."""
_WHOLE = Encoding.symmetric(1.0, "s8")
"""Of a matrix of 0 and 1: with 1 as the integer 1, the HTP's sums are off by hundreds of steps, with 127 by two."""


@dataclass(frozen=True, slots=True)
class GraphForm:
    """How a runtime wants graphs, where that is not as bundles have them. No form changes an integer.

    Attributes:
        stacks_heads: one past tensor and one new tensor for all heads of a layer: keys (in columns)
            `[kv_heads, 1, D, S-AR]` in and `[kv_heads, 1, D, AR]` out, values `[kv_heads, 1, S-AR, D]` and
            `[kv_heads, 1, AR, D]`, in the encoding of the first head. Each move is quantized again: the HTP compiler
            refuses to move bare 8-bit integers.
        selects_last: the logits of a prefill graph are those of row AR-1, without an input that selects the row.
        sink: its rows are constants in place of the past's first columns, whatever these hold: for a cache that starts
            empty and is right-aligned, which leaves them empty until the context is full.
        unsigned_adapters: inputs for adapters are uint16, their int16 integers plus 32768.
        whole_states: the output of a state has all its rows, see `with_whole_states`.
        gives_results: every result with a row for each token is an output too, as `NAME_q`.
    """

    stacks_heads: bool = False
    selects_last: bool = False
    sink: Sink | None = None
    unsigned_adapters: bool = False
    whole_states: bool = False
    gives_results: bool = False


AS_EXPORTED = GraphForm()


def unsigned(signed: Encoding) -> Encoding:
    """The uint16 encoding whose integers are those of an int16 encoding plus 32768."""
    return Encoding("u16", signed.scale, signed.zero_point + _UNSIGNED_ZERO)


def widened(encoding: Encoding) -> Encoding:
    """The uint16 encoding that has every value of an encoding of 8 bits: steps are divided by 256."""
    signed = encoding.zero_point - (128 if encoding.dtype == "u8" else 0)
    return Encoding("u16", encoding.scale / 256, 256 * signed + _UNSIGNED_ZERO)


UNREAD = Encoding("u16", 1 / 256, 32768)
"""Of `recurrent_state_{L}`; see `with_whole_states`."""
UNREAD_STATE = "recurrent_state"
_UNREAD_SHAPE = 1, 1, 1, 64


def with_whole_states(ports: GraphInterface) -> GraphInterface:
    """The interface whose states give the past rows before the new ones, `[1, 1, K-1+AR, H]`.

    A runtime without pointers copies K-1 of these rows, from the number of accepted tokens on, before the next pass.
    For Genie a layer with a state also has a recurrent one: an input that nothing reads, and that is passed through.
    """
    past_rows = {port.encoding: port.shape[2] for port in ports.inputs if port.kind == "state"}

    def unread(port: Port) -> Port:
        return Port(port.name.replace("conv_state", UNREAD_STATE), "uint16", _UNREAD_SHAPE, port.kind, UNREAD_STATE)

    def whole(port: Port) -> Port:
        rows = port.shape[2] + past_rows[port.encoding]
        return replace(port, shape=(*port.shape[:2], rows, port.shape[3]))

    states = [port for port in ports.outputs if port.encoding in past_rows]
    return GraphInterface(
        (*ports.inputs, *(unread(port) for port in ports.inputs if port.kind == "state")),
        (*(unread(port) for port in states), *(whole(port) if port in states else port for port in ports.outputs)),
    )


def stacked_past(kind: str, layer: int | str) -> str:
    """The graph input that stacks the heads of a layer; with the layer `%d`, onnxruntime-genai's template for it."""
    return f"past_{kind}_{layer}_in"


def stacked_new(kind: str, layer: int | str) -> str:
    """The graph output that stacks the heads of a layer."""
    return f"past_{kind}_{layer}_out"


class QdqOps(QdqBlocks, DeltaOps[Tensor]):
    """A part of a graph for AR new tokens in a context of S, under construction."""

    def __init__(
        self,
        graph: GraphRecord,
        part: PartRecord,
        decoder: DecoderInterface,
        spec: DecoderSpec,
        encodings: Mapping[str, Encoding],
        weights: StoredWeights,
        form: GraphForm = AS_EXPORTED,
    ) -> None:
        """Start with the inputs that all of its layers share.

        Args:
            graph: AR, context and role.
            part: the part of the graph to build.
            decoder: gives the inputs and outputs.
            spec: the decoder.
            encodings: one for every result and input.
            weights: of the decoder.
            form: what the runtime wants otherwise.
        """
        super().__init__(encodings, weights, spec.hidden, spec.eps)
        self._part = part
        self._form = form
        self._decoder = decoder
        self._ports = decoder.graph(graph, part)
        self._spec = spec
        self._pasts: dict[KvTensor, Tensor] = {}
        self._news: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        self._adapted: dict[str, Tensor] = {}
        self._made: dict[str, Tensor] = {}
        self._ar = graph.ar
        self._folds = folds_heads(graph, spec) and not form.gives_results
        self._by_row = gives_rows_by_step(graph)
        self._entry = self._embed() if part.embeds else self._read(self._ports.entry)
        kinds = ("layer_inputs", "mask", "cos", "sin", "target_hidden")
        shared = (port for port in self._ports.inputs if port.kind in kinds)
        self._shared = {port.name: self._read(port) for port in shared}
        self._cached: dict[KvTensor, Tensor] = {}

    # ------------------------------------------------------------------ the operations of a decoder

    @property
    def spec(self) -> DecoderSpec:
        """The decoder."""
        return self._spec

    @property
    def entry(self) -> Tensor:
        """The hidden state before the part's first layer, `[1, 1, AR, hidden]`, or the rows that a head reads."""
        return self._entry

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
        gamma = self._weight(*self._weights.tensor(weight), gain)
        return self._nodes.emit("RMSNormalization", [x.name, gamma], name, axis=-1, epsilon=self._spec.eps)

    def scale_by(self, x: Tensor, weight: str, name: str) -> Tensor:
        return self._nodes.emit("Mul", [x.name, self._weight(*self._weights.tensor(weight))], name)

    def shift_by(self, x: Tensor, weight: str, name: str) -> Tensor:
        return self._nodes.emit("Add", [x.name, self._weight(*self._weights.tensor(weight))], name)

    def chosen(self, x: Tensor, count: int, name: str) -> Tensor:
        """By counting: an element is chosen if fewer than `count` others are larger, or equal and before it.

        Not TopK: onnxruntime-qnn 2.7.0 computes it in float.
        """
        assert self._spec.experts is not None, "experts are chosen"
        nodes, elements = self._nodes, self._spec.experts.count
        own = self._reshape(x, f"{name}.own", (1, self._ar, elements, 1))
        others = self._reshape(x, f"{name}.others", (1, self._ar, 1, elements))
        larger, equal, few = (nodes.unique(f"{name}.{kind}") for kind in ("larger", "equal", "few"))
        nodes.node("Greater", [others.name, own.name], [larger])
        nodes.node("Equal", [others.name, own.name], [equal])
        before = np.tril(np.ones((1, 1, elements, elements)), -1)
        zero = self._count(0.0)
        tied = nodes.emit("Where", [equal, self._counts(f"before_{elements}", before), zero], f"{name}.tied", _COUNTS)
        ahead = nodes.emit("Where", [larger, self._count(1.0), tied.name], f"{name}.ahead", _COUNTS)
        along = nodes.constant("at_-1", np.array([WIDTH], np.int64))
        ranks = nodes.emit("ReduceSum", [ahead.name, along], f"{name}.ranks", _COUNTS, keepdims=1)
        ranks = self._reshape(ranks, f"{name}.rank", (1, 1, self._ar, elements))
        nodes.node("Greater", [self._count(count - 0.5), ranks.name], [few])
        encoding = self._encodings[name]
        ends = (
            nodes.dequantize_once(nodes.constant(f"{name}.{end}", encoding.quantize(np.array(float(end)))), encoding)
            for end in (1, 0)
        )
        return nodes.emit("Where", [few, *ends], name)

    def _count(self, value: float) -> str:
        return self._counts(f"count_{value!r}", np.array(value))

    def _counts(self, name: str, values: NDArray[Any]) -> str:
        return self._nodes.dequantize_once(self._nodes.constant(name, _COUNTS.quantize(values)), _COUNTS)

    def shares(self, x: Tensor, name: str) -> Tensor:
        nodes, encoding = self._nodes, self._encodings[f"{name}.sum"]
        along = nodes.constant("at_-1", np.array([WIDTH], np.int64))
        total = nodes.emit("ReduceSum", [x.name, along], f"{name}.sum", keepdims=1)
        step = nodes.constant(f"{name}.step", np.array(encoding.zero_point + 1, DTYPES[encoding.dtype]))
        least = nodes.dequantize_once(step, encoding)
        positive = nodes.emit("Max", [total.name, least], f"{name}.positive", encoding)
        return nodes.emit("Div", [x.name, positive.name], name)

    def layer_input(self, layer: int) -> Tensor:
        width = self._spec.input_width
        return self.slice(self._shared[LAYER_INPUTS_PORT], layer * width, width)

    def subtract(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Sub", [a.name, b.name], name)

    def scale(self, x: Tensor, factor: float, name: str) -> Tensor:
        return self._nodes.emit("Mul", [x.name, self._number(factor, x.encoding.dtype)], name)

    def _number(self, value: float, dtype: Dtype) -> str:
        """A constant above 0."""
        encoding = Encoding.asymmetric(0.0, value, dtype)
        integer = self._nodes.constant(f"factor_{value!r}", encoding.quantize(np.array(value)))
        return self._nodes.dequantize_once(integer, encoding)

    def tanh(self, x: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Tanh", [x.name], name)

    def sqrt(self, x: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Sqrt", [x.name], name)

    def sign(self, x: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Sign", [x.name], name)

    def slice(self, x: Tensor, first: int, width: int) -> Tensor:
        bounds = (first, first + width, WIDTH)
        begin, end, axis = (self._nodes.constant(f"at_{at}", np.array([at], np.int64)) for at in bounds)
        return self._nodes.emit("Slice", [x.name, begin, end, axis], x.name + ".part", x.encoding)

    def rotation(self, layer: int, heads: int) -> tuple[Tensor, Tensor]:
        rotary = self._decoder.rotary_of(layer)
        assert rotary is not None, "the decoder rotates only layers that have an embedding"
        cos, sin = (self._shared[name] for name in rotary.names)
        negative = self._once(sin, "negative", lambda name: self._nodes.emit("Neg", [sin.name], name, sin.encoding))
        pairs = (cos, cos), (negative, sin)
        both = [self._table(last, "both", [first.name, last.name], WIDTH) for first, last in pairs]
        if heads > 1:
            both = [self._table(table, f"of_{heads}", [table.name] * heads, _ROWS) for table in both]
        return both[0], both[1]

    def _table(self, x: Tensor, name: str, parts: list[str], axis: int) -> Tensor:
        """Parts of what all layers read, concatenated once."""
        return self._once(x, name, lambda name: self._nodes.emit("Concat", parts, name, x.encoding, axis=axis))

    def _once(self, x: Tensor, name: str, make: Callable[[str], Tensor]) -> Tensor:
        """What is made of a result once, under a name that begins with its name."""
        name = f"{x.name}.{name}"
        if name not in self._made:
            self._made[name] = make(name)
        return self._made[name]

    def append_to_cache(self, new: Tensor, tensor: KvTensor) -> Tensor:
        encoding = self._encodings[tensor.past]
        is_columns = tensor.kind == "key" and self._keys_are_columns
        if is_columns:
            new = self._nodes.emit("Transpose", [new.name], new.name + ".t", new.encoding, perm=TRANSPOSED)
        rows_axis = 3 if is_columns else 2
        parts = self._past(tensor, rows_axis) if self._decoder.is_cached else []
        is_whole = tensor.result != "cache" and self._form.whole_states
        written = tensor.new + ".row" if is_whole else tensor.new
        self._nodes.quantize(new.name, written, encoding)
        added = self._nodes.dequantize(written, tensor.new + "_dq", encoding)
        if self._form.stacks_heads:
            self._stack_new(tensor)
        if not parts:
            self._columns |= {added.name} if is_columns else set()
            return added
        return self._joined(tensor, [*parts, added.name], rows_axis)

    def cached(self, tensor: KvTensor) -> Tensor:
        if tensor in self._cached:
            return self._cached[tensor]
        # Another part has computed the new rows.
        rows_axis = 3 if tensor.kind == "key" and self._keys_are_columns else 2
        return self._joined(
            tensor, [*self._past(tensor, rows_axis), self._read(self._ports[tensor.new]).name], rows_axis
        )

    def _joined(self, tensor: KvTensor, parts: Sequence[str], rows_axis: int) -> Tensor:
        """Past and new rows."""
        name = f"{tensor.kind}_{tensor.layer}" + (f"_h{tensor.head}" if tensor.has_heads else "")
        if tensor.others in self._ports:
            parts = [*parts, self._read(self._ports[tensor.others]).name]
        encoding = self._encodings[tensor.past]
        if tensor.result != "cache" and self._form.whole_states:
            self._nodes.node("Concat", parts, [name + "_f"], axis=rows_axis)
            self._nodes.quantize(name + "_f", tensor.new, encoding)
            rows = self._nodes.dequantize(tensor.new, name, encoding)
            self._pass_unread(tensor.layer)
        else:
            rows = self._nodes.emit("Concat", parts, name, encoding, axis=rows_axis)
        if rows_axis != _ROWS:
            self._columns.add(rows.name)
        if tensor.kind == "conv" and encoding.dtype != "u16":  # the HTP multiplies equal types alone
            return self._nodes.requantize(rows.name, rows.name + ".wide", widened(encoding))
        self._cached[tensor] = rows
        return rows

    def tap(self, rows: Tensor, weight: str, tap: int, name: str) -> Tensor:
        states = self._spec.convolution_states
        assert states is not None, "a layer has one"
        past_rows = states.kernel - 1
        source = rows
        bounds = (tap, np.iinfo(np.int64).max if tap == past_rows else tap - past_rows, _ROWS)
        if CONV_ROWS in self._ports:
            ar = self._ports[CONV_ROWS].shape[0] // past_rows
            bounds = (tap, tap + ar, _ROWS)
            if tap < past_rows:
                source, bounds = self._gather(rows), (tap * ar, (tap + 1) * ar, _ROWS)
        begin, end, axis = (self._nodes.constant(f"at_{at}", np.array([at], np.int64)) for at in bounds)
        read = self._nodes.emit("Slice", [source.name, begin, end, axis], f"{rows.name}.rows", source.encoding)
        return self._nodes.emit("Mul", [read.name, self._weight(*self._weights.tensor(weight, tap=tap))], name)

    def _gather(self, rows: Tensor) -> Tensor:
        """The rows that the taps of a convolution read where new tokens do not follow each other, by tap."""
        inputs = [rows.name, CONV_ROWS]
        return self._once(
            rows, "gathered", lambda name: self._nodes.emit("Gather", inputs, name, rows.encoding, axis=_ROWS)
        )

    def _pass_unread(self, layer: int) -> None:
        """Give a layer's recurrent state as it is. Times 1: the compiler refuses an output that is an input."""
        name = f"{UNREAD_STATE}_{layer}"
        state = self._nodes.dequantize(f"{name}_in", f"{name}_in_dq", UNREAD)
        one = self._nodes.constant("unread_one", np.array(1, np.uint16))
        factor = self._nodes.dequantize_once(one, Encoding("u16", 1.0, 0))
        self._nodes.node("Mul", [state.name, factor], [f"{name}_f"])
        self._nodes.quantize(f"{name}_f", f"{name}_out", UNREAD)

    def masked(self, scores: Tensor, layer: int, name: str) -> Tensor:
        mask = self._shared[self._decoder.mask(layer)]
        return self._nodes.emit("Add", [scores.name, self._for_folded(mask, self._spec.group(layer)).name], name)

    def fold_heads(self, heads: list[Tensor], names: Sequence[str] = ()) -> list[Tensor]:
        if len(heads) == 1 or not self._folds:
            return heads
        names, (first, *_) = [head.name for head in heads], heads
        return [self._nodes.emit("Concat", names, first.name + ".folded", first.encoding, axis=_ROWS)]

    def unfold_heads(self, folded: list[Tensor], heads: int) -> list[Tensor]:
        if len(folded) == heads:
            return folded
        (rows,) = folded
        if self._ar > 1:
            apart = self._reshape(rows, rows.name + ".heads", (1, heads, self._ar, -1))
            rows = self._nodes.emit("Transpose", [apart.name], rows.name + ".tokens", rows.encoding, perm=[0, 2, 1, 3])
        return [self._reshape(rows, rows.name + ".unfolded", (1, 1, self._ar, -1))]

    def _for_folded(self, mask: Tensor, heads: int) -> Tensor:
        """A mask with a row for each row of several heads: the HTP takes twice as long to add one that is repeated."""
        if not self._folds or heads == 1:
            return mask
        return self._table(mask, f"of_{heads}", [mask.name] * heads, _ROWS)

    # ------------------------------------------------------------------ a gated delta rule or Mamba-2

    @property
    def new_rows(self) -> int:
        return self._ar

    @property
    def by_row(self) -> bool:
        return self._by_row

    def unit(self, x: Tensor, width: int, name: str, *, gain: float = 1.0) -> Tensor:
        factor = gain / width**0.5
        encoding = unit_encoding(factor)
        integers = self._nodes.constant(f"unit_{width}_{factor!r}", encoding.quantize(np.full(width, factor)))
        gamma = self._nodes.dequantize_once(integers, encoding)
        return self._nodes.emit("RMSNormalization", [x.name, gamma], name, axis=-1, epsilon=UNIT_EPS / width)

    def relu(self, x: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Relu", [x.name], name)

    def exp(self, x: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Exp", [x.name], name)

    def complement(self, x: Tensor, of: float, name: str) -> Tensor:
        return self._nodes.emit("Sub", [self._number(of, x.encoding.dtype), x.name], name)

    def times(self, x: Tensor, weight: str, at: int, name: str) -> Tensor:
        return self._nodes.emit("Mul", [x.name, self._weight(*self._weights.tensor(weight, head=at))], name)

    def shift(self, x: Tensor, weight: str, name: str) -> Tensor:
        return self._nodes.emit("Add", [x.name, self._weight(*self._weights.tensor(weight))], name)

    def stored(self, tensor: KvTensor) -> Tensor:
        if tensor not in self._pasts:
            self._pasts[tensor] = self._read(self._ports[tensor.past])
        return self._pasts[tensor]

    def extended(self, rows: Tensor, new: Tensor, tensor: KvTensor) -> Tensor:
        encoding = self._encodings[tensor.past]
        return self._nodes.emit("Concat", [rows.name, new.name], f"{tensor.kind}_{tensor.layer}", encoding, axis=_ROWS)

    def row(self, x: Tensor, row: int) -> Tensor:
        return x if self._ar == 1 else self._slice(x, row, row + 1, _ROWS)

    def together(self, rows: list[Tensor], name: str) -> Tensor:
        if len(rows) == 1:
            return rows[0]
        return self._nodes.emit("Concat", [row.name for row in rows], name, axis=_ROWS)

    def columns(self, x: Tensor, stop: int) -> Tensor:
        return self._slice(x, 0, CHECKPOINT_TOKENS + stop, WIDTH)

    def new_columns(self, x: Tensor) -> Tensor:
        return self._slice(x, CHECKPOINT_TOKENS, CHECKPOINT_TOKENS + self._ar, WIDTH)

    def decay_sums(self, rows: Tensor, name: str) -> Tensor:
        nodes, count = self._nodes, CHECKPOINT_TOKENS + self._ar
        after = nodes.constant(f"after_{count}", _WHOLE.quantize(rows_after(count)))
        return nodes.emit("MatMul", [self.across(rows).name, nodes.dequantize_once(after, _WHOLE)], name)

    def across(self, rows: Tensor) -> Tensor:
        row = self._once(rows, "row", lambda name: self._reshape(rows, name, (1, 1, 1, -1)))
        if self._ar == 1:
            return row
        seen = self._matrix_of_ones("seen", CHECKPOINT_TOKENS + self._ar)
        return self._once(rows, "seen", lambda name: self._nodes.emit("Mul", [row.name, seen], name, rows.encoding))

    def decays(self, sums: Tensor, name: str) -> tuple[Tensor, Tensor]:
        count = CHECKPOINT_TOKENS + self._ar
        exponentials = self._nodes.emit("Exp", [sums.name], name)
        rows, start = self._slice(exponentials, 0, count, WIDTH), self._slice(exponentials, count, count + 1, WIDTH)
        if self._ar > 1:
            seen = self._matrix_of_ones("seen", count)
            rows = self._nodes.emit("Mul", [rows.name, seen], name + ".seen", rows.encoding)
        return rows, start

    def between_blocks(self, system: Tensor, size: int) -> Tensor:
        chosen = self._matrix_of_ones(f"between_{size}", self._ar)
        return self._nodes.emit("Mul", [system.name, chosen], f"{system.name}.between", system.encoding)

    def from_identity(self, x: Tensor, name: str) -> Tensor:
        return self._nodes.emit("Sub", [self._matrix_of_ones("identity", self._ar), x.name], name)

    def observe_known(self, target: Tensor, correction: Tensor, name: str) -> None:
        """Nothing: encodings are chosen."""

    def _matrix_of_ones(self, kind: str, columns: int) -> str:
        """A constant of 0 and 1, `[1, 1, AR, columns]`."""
        name = f"{kind}_{self._ar}x{columns}"
        if kind == "seen":
            values: NDArray[Any] = np.tri(self._ar, columns, columns - self._ar)
        elif kind == "identity":
            values = np.eye(columns)
        else:
            values = between_blocks(columns, int(kind.removeprefix("between_")))
        constant = self._nodes.constant(name, SHARES.quantize(values)[None, None])
        return self._nodes.dequantize_once(constant, SHARES)

    def _slice(self, x: Tensor, first: int, stop: int, axis: int) -> Tensor:
        bounds = (self._nodes.constant(f"at_{at}", np.array([at], np.int64)) for at in (first, stop, axis))
        return self._nodes.emit("Slice", [x.name, *bounds], x.name + ".part", x.encoding)

    # ------------------------------------------------------------------ the cache

    def _past(self, tensor: KvTensor, rows_axis: int) -> list[str]:
        """The past of a head, behind the sink if that is a constant."""
        if self._form.stacks_heads:
            if tensor not in self._pasts:
                self._split_past(tensor)
            past = self._pasts[tensor]
        else:
            past = self.stored(tensor)
        if (sink := self._form.sink) is None:
            return [past.name]
        rows, encoding = sink.rows[tensor.past], self._encodings[tensor.past]
        rows = np.ascontiguousarray(rows.T if rows_axis == 3 else rows)[None, None]
        bounds = len(sink.tokens), np.iinfo(np.int64).max, rows_axis
        slices = [self._nodes.constant(f"at_{at}", np.array([at], np.int64)) for at in bounds]
        rest = self._nodes.emit("Slice", [past.name, *slices], tensor.past + "_rest", encoding)
        first = self._nodes.constant(tensor.past + "_sink_q", rows)
        return [self._nodes.dequantize(first, tensor.past + "_sink", encoding).name, rest.name]

    def _split_past(self, tensor: KvTensor) -> None:
        """Read the past of all heads of a layer from one input, each in its own encoding."""
        heads = [replace(tensor, head=head) for head in range(self._spec.of_layer(tensor.layer).kv_heads)]
        shared, name = self._encodings[heads[0].past], stacked_past(tensor.kind, tensor.layer)
        whole = self._nodes.dequantize(name, name + "_dq", shared)
        parts = [head.past + "_part" for head in heads]
        floats = [part + "_f" for part in parts]
        self._nodes.node("Split", [whole.name], floats, axis=0, num_outputs=len(heads))
        for head, part, source in zip(heads, parts, floats, strict=True):
            self._pasts[head] = self._rescale(self._nodes.requantize(source, part, shared), self._encodings[head.past])

    def _stack_new(self, tensor: KvTensor) -> None:
        """Write the new rows of a layer's heads into one output, once the last of them is known."""
        shared = self._encodings[replace(tensor, head=0).past]
        part = self._nodes.dequantize(tensor.new, tensor.new + "_part", self._encodings[tensor.past])
        if part.encoding != shared:
            # As one row: onnxruntime-qnn 2.7.0 multiplies a new value of 8 or 16 rows into garbage.
            row = self._rescale(self._reshape(part, part.name + "_row", (1, 1, 1, -1)), shared)
            part = self._reshape(row, row.name + "_matrix", self._ports[tensor.new].shape)
        self._news[tensor.kind, tensor.layer].append(part.name)
        if tensor.head == self._spec.of_layer(tensor.layer).kv_heads - 1:
            name = stacked_new(tensor.kind, tensor.layer)
            self._nodes.node("Concat", self._news[tensor.kind, tensor.layer], [name + "_f"], axis=0)
            self._nodes.quantize(name + "_f", name, shared)

    def _rescale(self, x: Tensor, encoding: Encoding) -> Tensor:
        """The same integers under another scale: multiplied by an integer 1 whose scale is the ratio of the two.

        Each head has its own scale, but the tensor that stacks them can have only one.
        """
        if x.encoding == encoding:
            return x
        one = self._nodes.constant(x.name + "_one_q", np.array(1, np.uint8))
        ratio = self._nodes.dequantize(one, x.name + "_one", Encoding("u8", encoding.scale / x.encoding.scale, 0))
        return self._nodes.emit("Mul", [x.name, ratio.name], x.name + "_own", encoding)

    # ------------------------------------------------------------------ entry and exit of a part

    def _embed(self) -> Tensor:
        """The rows of the embedding table for `input_ids`: integers times the scales of rows, both as integers."""
        ids, nodes = self._ports.entry, self._nodes
        integers = self._weights.table()
        steps, encoding = self._weights.tensor(EMBEDDING_STEPS)
        self._stored[integers] = None
        table = nodes.dequantize(integers, integers + "_dq", _BYTES)
        narrow = nodes.emit("Gather", [table.name, ids.name], "embedding.integers", _BYTES, axis=0)
        wide = nodes.requantize(narrow.name, "embedding.wide", _INTEGERS)  # the HTP multiplies equal types alone
        if self._weights.has_columns:
            columns = self._weight(*self._weights.tensor(EMBEDDING_COLUMNS))
            wide = nodes.emit("Mul", [wide.name, columns], "embedding.columns")
        scales = nodes.emit("Gather", [self._weight(steps, encoding), ids.name], "embedding.scales", encoding, axis=0)
        rows = nodes.emit("Mul", [wide.name, scales.name], "embedding")
        shape = nodes.constant("shape_1_1_ar", np.array([1, *ids.shape, -1], np.int64))
        return nodes.emit("Reshape", [rows.name, shape], "embedding")

    def select(self, hidden: Tensor) -> Tensor:
        """The row of `hidden` that `logits_index` selects, `[1, 1, 1, hidden]`: an input, or the constant AR-1."""
        if self._form.selects_last:
            self._nodes.constant(LOGITS_INDEX, np.array([self._ports.entry.shape[-1] - 1], np.int32))
        return self._nodes.emit("Gather", [hidden.name, LOGITS_INDEX], "selected", hidden.encoding, axis=_ROWS)

    def give_logits(self, logits: Tensor) -> None:
        """Make them the last output, `[1, rows, vocab]`."""
        shape = self._nodes.constant("shape_logits", np.array(self._ports.exit.shape, np.int64))
        self._nodes.node("Reshape", [logits.name, shape], ["logits_f"])
        self._nodes.quantize("logits_f", LOGITS, logits.encoding)
        self._nodes.quantized[LOGITS] = logits.encoding

    def target_hidden(self) -> Tensor:
        return self._shared[TARGET_HIDDEN]

    def give_hidden(self, x: Tensor) -> None:
        shape = self._nodes.constant("shape_hidden", np.array(self._ports[LAST_HIDDEN].shape, np.int64))
        self._nodes.node("Reshape", [x.name, shape], ["last_hidden_f"])
        self._nodes.quantize("last_hidden_f", LAST_HIDDEN, x.encoding)

    @property
    def results(self) -> dict[str, Encoding]:
        """Encodings of the results so far that a trace has, by the names of their integers, in order.

        These have a row for each token, and are no signs.
        """
        return {
            name: quantization for name, quantization in self._nodes.quantized.items() if not _NOT_TRACED.search(name)
        }

    def read(self, name: str) -> Tensor:
        """The input of this name."""
        return self._read(self._ports[name])

    def give(self, x: Tensor, name: str) -> None:
        """Make a result the output of this name, in the encoding of that."""
        self._nodes.quantize(x.name, name, self._encodings[name])

    def give_residual(self, hidden: Tensor) -> None:
        """Make the integers of a result the last output."""
        if self._form.gives_results:
            return  # they are one, under their own name
        nodes = self._nodes.nodes
        at = next(at for at in reversed(range(len(nodes))) if nodes[at].output[0] == hidden.name)
        quantize, dequantize = nodes[at - 1 : at + 1]
        quantize.output[0] = dequantize.input[0] = self._part.exit
        if at == len(nodes) - 1:
            nodes.pop()  # nothing else reads it

    def finish(self) -> onnx.ModelProto:
        """The model. Flush the store first."""
        stored = [self._weights.initializer(name) for name in self._stored]
        constants = [*self._nodes.constants, *stored]
        inputs, outputs = ([value_info(port) for port in ports] for ports in self._formed())
        return make_model(self._part.name, self._nodes.nodes, inputs, outputs, constants)

    def _formed(self) -> tuple[Sequence[Port], Sequence[Port]]:
        """The inputs and outputs in the form that the runtime wants."""
        ports = with_whole_states(self._ports) if self._form.whole_states else self._ports
        inputs, outputs = [*ports.inputs], [*ports.outputs]
        if self._form.selects_last:
            inputs = [port for port in inputs if port.kind != "logits_index"]
        if self._form.unsigned_adapters:
            inputs = [replace(port, dtype="uint16") if port.kind == "lora" else port for port in inputs]
        if self._form.stacks_heads:
            tensors = {tensor.past: tensor for tensor in self._decoder.tensors(self._part.layers)}
            inputs, outputs = (self._stacked(ports, tensors) for ports in (inputs, outputs))
        if self._form.gives_results:
            outputs = [port for port in outputs if port.kind != "hidden"]
            outputs[:0] = [_result(name, encoding) for name, encoding in self.results.items() if name != LOGITS]
        return inputs, outputs

    def _stacked(self, ports: Sequence[Port], tensors: Mapping[str, KvTensor]) -> list[Port]:
        """With one port for all heads of a layer; `tensors` are those of the cache by the names of their encodings."""
        stacked: dict[str, Port] = {}
        for port in ports:
            if port.kind in ("past", "new"):
                assert port.encoding is not None, "a port of the cache"
                tensor, name_of = tensors[port.encoding], stacked_past if port.kind == "past" else stacked_new
                name, shape = (
                    name_of(tensor.kind, tensor.layer),
                    (self._spec.of_layer(tensor.layer).kv_heads, *port.shape[1:]),
                )
                stacked.setdefault(name, replace(port, name=name, shape=shape))
            else:
                stacked[port.name] = port
        return [*stacked.values()]

    # ------------------------------------------------------------------ inputs and constants

    @property
    def _keys_are_columns(self) -> bool:
        return self._decoder.cache.key_layout == "columns"

    def _read(self, port: Port) -> Tensor:
        """An input, dequantized."""
        assert port.encoding is not None, "token ids are gathered"
        encoding, name = self._encodings[port.encoding], port.name
        if port.kind == "lora" and self._form.unsigned_adapters:
            self._nodes.dequantize(port.name, port.name + ".unsigned", unsigned(encoding))
            name = port.name + ".signed"
            self._nodes.quantize(port.name + ".unsigned", name, encoding)
        return self._nodes.dequantize(name, port.name + "_dq", encoding)


def make_model(
    name: str,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Sequence[onnx.TensorProto],
) -> onnx.ModelProto:
    """A model of the version that the HTP compiler reads."""
    model: onnx.ModelProto = helper.make_model(
        helper.make_graph(nodes, name, inputs, outputs, constants),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="edgekv",
    )
    return model


def _result(name: str, encoding: Encoding) -> Port:
    return Port(name, DTYPES[encoding.dtype].name, ())


def value_info(port: Port) -> onnx.ValueInfoProto:
    """An input or output of a model."""
    element = helper.np_dtype_to_tensor_dtype(np.dtype(port.dtype))
    value: onnx.ValueInfoProto = helper.make_tensor_value_info(port.name, element, port.shape or None)
    return value
