"""The decoder's operations for a CPU: the heads of a layer are one tensor, and one node computes all of them.

The decoder asks head by head. The first head that asks for an operation has it written for all heads; the others get
views of the same result.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgekv.bundle import MANIFEST, BundleWeights, Extent
from edgekv.bundle.manifest_file import export_again
from edgekv.errors import BundleError
from edgekv.graphs.decoder import layer_result
from edgekv.graphs.delta_rule import (
    SHARES,
    UNIT_EPS,
    DeltaOps,
    between_blocks,
    gives_rows_by_step,
    rows_after,
    unit_encoding,
)
from edgekv.graphs.nodes import Nodes
from edgekv.graphs.source import PartSource, built_manifest
from edgekv.spec import (
    CHECKPOINT_TOKENS,
    CONV_ROWS,
    EMBEDDING,
    EMBEDDING_COLUMNS,
    LAST_HIDDEN,
    LAYER_INPUTS_PORT,
    LOGITS,
    LOGITS_INDEX,
    OPEN_ROWS,
    OPEN_TOKENS,
    STACK,
    TARGET_HIDDEN,
    ConvolutionStates,
    KvTensor,
    LoraTarget,
    Port,
    head_width,
    lora_a,
    lora_added,
    lora_b,
    lora_group,
    lora_reach,
    part_name,
    table_key,
)
from quant import Encoding

_HEAD = re.compile(r"\.h\d+")
_GROUP = re.compile(r"(?<=\.g)\d+")
_LAYER = re.compile(r"(?<=^layers\.)\d+")
_SWAPPED = (0, 1, 3, 2)
_ROWS = 2  # axis of [1, 1, rows, width]
_MOST = np.iinfo(np.int64).max
_AXES_OF_TOKENS = {"ids": 1} | dict.fromkeys(
    ("embeddings", "layer_inputs", "hidden", "mask", "cos", "sin", "borrowed", "new", "target_hidden", "last_hidden"),
    _ROWS,
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class View:
    """A result: a tensor `[1, AR, width]`, or one head of a stack `[heads, 1, AR, width]`.

    Attributes:
        tensor: its name.
        heads: of the stack; 0 if there is none.
        head: its number in the stack.
        encodings: of its integers, one for each head.
        blocks: of a stack that is divided along the rows, the tensors of its blocks; `tensor` is the first one.
    """

    tensor: str
    heads: int = 0
    head: int = 0
    encodings: tuple[Encoding, ...] = ()
    blocks: tuple[str, ...] = ()


class StackedOps(DeltaOps[View]):
    """A part of a graph for AR new tokens in a context of S, under construction; see `EmulatedOps` and `FloatOps`.

    Inputs and outputs are those of the exported graph, but for keys, which are rows, and for adapters: their floats,
    and the B's of all heads of a projection as one input.
    """

    def __init__(self, source: PartSource, weights: BundleWeights, *, batch_invariant: bool) -> None:
        """Start with the inputs that all layers share.

        Args:
            source: the part to build.
            weights: of the bundle.
            batch_invariant: whether the bits of a row must not depend on how many others there are.
        """
        manifest, graph = built_manifest(source.manifest), source.graph
        self.spec = manifest.model
        self._source = source
        self._part = source.part
        self._ar = graph.ar
        self._takes_fewer = source.takes_fewer
        self._decoder = manifest.interface
        self._ports = self._decoder.graph(graph, source.part)
        self._weights = weights
        self._batch_invariant = batch_invariant
        self._nodes = Nodes()
        self._made: dict[tuple[object, ...], Any] = {}
        self._adapters: list[onnx.ValueInfoProto] = []
        self._rows = self._ar
        self._single_rows: set[str] = set()
        self._integers: set[str] = set()
        """Keys and values, past and new."""
        self._tails: set[str] = set()
        """Floats of the tail of a gated delta rule, or of its matrices: they have other rows than the new tokens."""

    # ------------------------------------------------------------------ what the two forms do each in their own way

    @abstractmethod
    def _rounded(self, x: str, name: str, heads: int = 0) -> View:
        """A result, in the encodings of its name."""

    @abstractmethod
    def _product(self, x: View, keys: Sequence[str], name: str) -> str:
        """`[1, AR, out]`, the product with one matrix or with several beside each other."""

    @abstractmethod
    def _by_keys(self, query: View, keys: View) -> str:
        """`query @ keys.T`, as softmax and the mask read it."""

    @abstractmethod
    def _by_group(self, weights: View, values: View) -> tuple[str, int]:
        """The weights of attention as a product with the values that groups share reads them, and its rows."""

    def _table(self) -> tuple[str, Extent, Extent]:
        """The file of the embedding table, and the places of its integers and scales there."""
        place = self._weights.places.matrices[table_key(self.spec)]
        integers, scales = place.extents
        return place.file, integers, scales

    # ------------------------------------------------------------------ projections

    def linear(
        self, x: View, weight: str, name: str, *, bias: str | None = None, head: int | None = None, gain: float = 1.0
    ) -> View:
        if head is None:
            return self._once(("linear", weight), lambda: self._whole(x, weight, name, bias, gain))
        stack = self._once(("linear", weight), lambda: self._by_head(x, weight, name, bias, gain))
        return replace(stack, head=head)

    def _whole(self, x: View, weight: str, name: str, bias: str | None, gain: float) -> View:
        product = self._product(x, [weight], name)
        if bias is None:
            return self._rounded(product, name)
        unbiased = self._rounded(product, name + ".unbiased")
        return self._rounded(self._nodes.add("Add", [unbiased.tensor, self._floats(bias, gain)], name), name)

    def _by_head(self, x: View, weight: str, name: str, bias: str | None, gain: float) -> View:
        place = self._weights.places.matrices[weight]
        heads = place.columns // head_width(self.spec, weight)
        product = self._to_heads(self._product(x, [weight], name), heads)
        if bias is None:
            return self._rounded(product, name, heads)
        unbiased = self._rounded(product, name + ".unbiased", heads)
        added = self._nodes.add("Add", [unbiased.tensor, self._biases(bias, heads, gain)], name)
        return self._rounded(added, name, heads)

    def adapt(self, y: View, x: View, layer: int, target: LoraTarget, name: str, *, head: int | None = None) -> View:
        if (lora := self._decoder.lora) is None or target not in lora:
            return y
        width = lora[target].outputs

        def adapt() -> View:
            product = self._multiply(self._reduced(x, layer, target), self._adapter(pieces), self._ar)
            added = self._rounded(product, lora_added(layer, target)).tensor
            if not y.heads:
                added = self._nodes.reshape(added, [1, -1, width])
            return self._as(self._nodes.add("Add", [y.tensor, added], name + ".adapted"), y)

        pieces = [lora_b(layer, target, head) for head in range(y.heads)] or [lora_b(layer, target)]
        return replace(self._once(("adapted", layer, target), adapt), head=y.head)

    def _reduced(self, x: View, layer: int, target: LoraTarget) -> str:
        """`x A`, `[1, 1, AR, R]`, for all projections of a group."""
        group = lora_group(target)

        def reduce() -> str:
            product = self._multiply(self._tensor(x), self._adapter([lora_a(layer, group)]), self._ar)
            return self._rounded(product, lora_reach(layer, group)).tensor

        return self._once(("reduced", layer, group), reduce)

    def _adapter(self, names: Sequence[str]) -> str:
        """An input for parts of adapters, stacked along the first axis, as floats."""
        name = STACK.join(names)
        shape = (len(names), *self._ports[names[0]].shape[1:])
        self._adapters.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    # ------------------------------------------------------------------ operations on each element or row

    def rms_norm(self, x: View, weight: str, name: str, *, gain: float = 1.0) -> View:
        attributes = {"axis": -1, "epsilon": self.spec.eps}
        return self._each("RMSNormalization", [x], name, [self._floats(weight, gain)], **attributes)

    def normalize(self, x: View, width: int, name: str) -> View:
        attributes = {"axis": -1, "epsilon": self.spec.eps}
        return self._each("RMSNormalization", [x], name, [self._unit_weights(width)], **attributes)

    def _unit_weights(self, width: int) -> str:
        ones = np.ones(width, np.float32)
        return self._once(("ones", width), lambda: self._nodes.constant(ones, f"ones_{width}"))

    def scale_by(self, x: View, weight: str, name: str) -> View:
        return self._each("Mul", [x], name, [self._floats(weight)])

    def layer_input(self, layer: int) -> View:
        width = self.spec.layer_inputs
        tensor = self._once(
            ("layer inputs",),
            lambda: self._nodes.reshape(self._input(LAYER_INPUTS_PORT), [1, -1, self.spec.layers * width]),
        )
        return self.slice(View(tensor, encodings=(self._encoding(LAYER_INPUTS_PORT),)), layer * width, width)

    def add(self, a: View, b: View, name: str) -> View:
        return self._each("Add", [a, b], name)

    def subtract(self, a: View, b: View, name: str) -> View:
        return self._each("Sub", [a, b], name)

    def multiply(self, a: View, b: View, name: str) -> View:
        return self._each("Mul", [a, b], name)

    def scale(self, x: View, factor: float, name: str) -> View:
        return self._each("Mul", [x], name, [self._number(factor)])

    def _number(self, value: float) -> str:
        """A constant above 0, in the encoding that the exported graph stores it in."""
        encoding = Encoding.asymmetric(0.0, value, "u16")
        return self._nodes.number(float(encoding.dequantize(encoding.quantize(np.array(value)))))

    def sigmoid(self, x: View, name: str) -> View:
        return self._each("Sigmoid", [x], name)

    def tanh(self, x: View, name: str) -> View:
        return self._each("Tanh", [x], name)

    def sqrt(self, x: View, name: str) -> View:
        return self._each("Sqrt", [x], name)

    def sign(self, x: View, name: str) -> View:
        return self._each("Sign", [x], name)

    def gelu(self, x: View, name: str) -> View:
        return self._each("Gelu", [x], name, approximate="tanh")

    def softmax(self, x: View, name: str) -> View:
        return self._each("Softmax", [x], name, axis=-1)

    def masked(self, scores: View, layer: int, name: str) -> View:
        return self._each("Add", [scores, View(self._input(self._decoder.mask(layer)))], name)

    def split(self, x: View, widths: Sequence[int]) -> list[View]:
        if not x.heads:  # into heads: nothing else that has none is divided
            heads, is_tail = len(widths), x.tensor in self._tails
            stack = self._once(
                ("heads", x.tensor),
                lambda: self._tail_heads(x.tensor, heads, widths[0]) if is_tail else self._to_heads(x.tensor, heads),
            )
            return [View(stack, len(widths), head, x.encodings * len(widths)) for head in range(len(widths))]
        parts = self._once(("split", x.tensor, *widths), lambda: self._nodes.split(x.tensor, widths, -1))
        return [replace(x, tensor=part) for part in parts]

    def heads_of(self, x: View, count: int) -> list[View]:
        stack = self._once(("heads", x.tensor), lambda: self._to_heads(self._tensor(x), count))
        return [View(stack, count, head, x.encodings * count) for head in range(count)]

    def slice(self, x: View, first: int, width: int) -> View:
        bounds = [self._nodes.integers([at]) for at in (first, first + width, -1)]
        tensor = self._tensor(x)
        return replace(x, tensor=self._nodes.add("Slice", [tensor, *bounds], tensor + ".slice"))

    def join(self, parts: list[View], name: str) -> View:
        if parts[0].heads and {part.tensor for part in parts} == {parts[0].tensor}:
            return View(self._from_heads(parts[0]), encodings=parts[0].encodings[:1])
        return self._each("Concat", parts, name, axis=-1)

    def rotation(self, layer: int, heads: int) -> tuple[View, View]:
        rotary = self._decoder.rotary_of(layer)
        assert rotary is not None, "the decoder rotates only layers that have an embedding"
        return self._once(("rotation", rotary.names), lambda: self._for_both_elements(*rotary.names))

    def _for_both_elements(self, cos_name: str, sin_name: str) -> tuple[View, View]:
        """The tables of pairs for the first and the second element of each."""
        cos, sin = self._input(cos_name), self._input(sin_name)
        like = View(sin, encodings=(self._encoding(sin_name),))
        negative = self._as(self._nodes.add("Neg", [sin], f"{sin}.negative"), like).tensor
        parts = (cos, cos), (negative, sin)
        both = [View(self._nodes.add("Concat", pair, f"{pair[1]}.both", axis=-1)) for pair in parts]
        return both[0], both[1]

    def swap_halves(self, x: View, half: int) -> View:
        first, last = (part.tensor for part in self.split(x, [half, half]))
        key = ("Concat", last, first)
        tensor = self._once(key, lambda: self._nodes.add("Concat", key[1:], f"{x.tensor}.swapped", axis=-1))
        return replace(x, tensor=tensor)

    # ------------------------------------------------------------------ attention

    def append_to_cache(self, new: View, tensor: KvTensor) -> View:
        append = {"cache": self._appended, "state": self._appended_state, "tail": self._appended_tail}[tensor.result]
        if tensor.kind == "decay":
            append = self._appended_decays
        stack = self._once(("cache", tensor.layer, tensor.kind), lambda: append(new, tensor))
        return replace(stack, head=new.head)

    def cached(self, tensor: KvTensor) -> View:
        # Another part has computed the new rows, if none are made here.
        stack = self._once(("cache", tensor.layer, tensor.kind), lambda: self._borrowed(tensor))
        return replace(stack, head=tensor.head)

    def _appended_state(self, new: View, tensor: KvTensor) -> View:
        """The floats of the rows of a state, past and new, `[1, 1, K-1+AR, H]`."""
        nodes, encodings = self._nodes, (self._encoding(tensor.past),)
        rows = nodes.reshape(self._tensor(new), [1, 1, -1, self._states.width])
        nodes.quantize(rows, encodings, tensor.new)
        parts = [tensor.past, tensor.new, *([tensor.others] if tensor.others in self._ports else [])]
        together = nodes.add("Concat", parts, f"{tensor.past}.all", axis=2)
        return View(nodes.dequantize(together, encodings, f"{together}.floats"), encodings=encodings)

    def tap(self, rows: View, weight: str, tap: int, name: str) -> View:
        past_rows = self._states.kernel - 1
        source, start, end = rows.tensor, tap, _MOST if tap == past_rows else tap - past_rows
        if CONV_ROWS in self._ports and tap < past_rows:
            gathered = [source, CONV_ROWS]
            source = self._once(
                ("gathered", rows.tensor),
                lambda: self._nodes.add("Gather", gathered, f"{rows.tensor}.gathered", axis=_ROWS),
            )
            start, end = tap * self._ar, (tap + 1) * self._ar
        elif CONV_ROWS in self._ports:
            end = tap + self._ar
        bounds = [self._nodes.integers([at]) for at in (start, end, _ROWS)]
        read = self._nodes.add("Slice", [source, *bounds], f"{rows.tensor}.rows")
        flat = View(self._nodes.reshape(read, [1, -1, self._states.width]))
        return self._each("Mul", [flat], name, [self._floats(part_name(weight, tap=tap))])

    def _appended(self, new: View, tensor: KvTensor) -> View:
        """The integers of past and new rows of all heads."""
        nodes, heads = self._nodes, [replace(tensor, head=head) for head in range(new.heads)]
        encodings = tuple(self._encoding(each.past) for each in heads)
        integers = nodes.quantize(new.tensor, encodings, tensor.new if new.heads == 1 else f"{tensor.new}.of_all")
        names = [each.new for each in heads]
        if new.heads > 1:
            nodes.split(integers, [1] * len(heads), 0, names)
        return self._together_rows(heads)

    def _borrowed(self, tensor: KvTensor) -> View:
        """The same of a layer of an earlier part, whose new rows are inputs."""
        kv_heads = self.spec.of_layer(tensor.layer).kv_heads
        return self._together_rows([replace(tensor, head=head) for head in range(kv_heads)])

    def _together_rows(self, heads: Sequence[KvTensor]) -> View:
        """Past and new rows of all heads, which are inputs or results."""
        nodes, tensor = self._nodes, heads[0]
        encodings = tuple(self._encoding(each.past) for each in heads)
        pairs = [name for each in heads for name in (each.past, each.new)]
        # One copy of the past: the rows of the heads follow each other.
        together = nodes.add("Concat", pairs, f"{tensor.past}.all", axis=2)
        if len(heads) > 1:
            together = nodes.reshape(together, [len(heads), 1, -1, self.spec.of_layer(tensor.layer).head_dim])
        self._integers.add(together)
        return View(together, len(heads), 0, encodings)

    def scores(self, query: View, keys: View, name: str) -> View:
        if keys.tensor in self._tails:
            turned = self._once(("turned", keys.tensor), lambda: self._nodes.transpose(keys.tensor, *_SWAPPED))
            return self._stack_product(query, replace(keys, tensor=turned), name)

        def scored() -> View:
            return self._rounded(self._by_keys(query, keys), name, query.heads)

        return replace(self._once(("scores", query.tensor, keys.tensor), scored), head=query.head)

    def attend(self, weights: View, values: View, name: str) -> View:
        if not self._is_cached(values):
            return self._stack_product(weights, self._operand(values), name)

        def attended() -> View:
            left, rows = self._by_group(weights, values)
            product = self._multiply(left, self._dequantized(values), rows)
            return self._rounded(self._apart(product, weights.heads), name, weights.heads)

        return replace(self._once(("attend", weights.tensor, values.tensor), attended), head=weights.head)

    # ------------------------------------------------------------------ a gated delta rule

    @property
    def new_rows(self) -> int:
        return min(self._ar, CHECKPOINT_TOKENS)

    @property
    def by_row(self) -> bool:
        return gives_rows_by_step(self._source.graph)

    def unit(self, x: View, width: int, name: str, *, gain: float = 1.0) -> View:
        factor = gain / width**0.5
        encoding = unit_encoding(factor)
        values = encoding.dequantize(encoding.quantize(np.full(width, factor)))
        gamma = self._nodes.constant(values, f"unit_{width}_{factor!r}")
        return self._each("RMSNormalization", [x], name, [gamma], axis=-1, epsilon=UNIT_EPS / width)

    def relu(self, x: View, name: str) -> View:
        return self._each("Relu", [x], name)

    def exp(self, x: View, name: str) -> View:
        return self._each("Exp", [x], name)

    def complement(self, x: View, of: float, name: str) -> View:
        tensor = self._nodes.add("Sub", [self._number(of), x.tensor], name)
        return self._rounded(tensor, name, x.heads)

    def times(self, x: View, weight: str, at: int, name: str) -> View:
        def factors() -> str:
            values = [self._values(part_name(weight, head), 1.0) for head in range(x.heads)]
            return self._nodes.constant(np.stack(values)[:, None, None], f"{weight}.of_heads")

        return self._each("Mul", [x], name, [self._once(("factors", weight), factors)])

    def stored(self, tensor: KvTensor) -> View:
        encodings = (self._encoding(tensor.past),)
        name = f"{tensor.past}.floats"
        return self._tail(self._once((name,), lambda: self._nodes.dequantize(tensor.past, encodings, name)), encodings)

    def _tail(self, floats: str, encodings: tuple[Encoding, ...]) -> View:
        self._tails.add(floats)
        return View(floats, encodings=encodings)

    def _appended_tail(self, new: View, tensor: KvTensor) -> View:
        """Past and new rows of all heads `[1, 1, P+AR, width]`, as floats that are rounded as the cache holds them."""
        nodes, encodings = self._nodes, (self._encoding(tensor.past),)
        rows = nodes.reshape(self._tensor(new), [1, 1, -1, self._tail_width(tensor)])
        nodes.quantize(rows, encodings, tensor.new)
        together = nodes.add("Concat", [tensor.past, tensor.new], f"{tensor.past}.all", axis=_ROWS)
        return self._tail(nodes.dequantize(together, encodings, f"{together}.floats"), encodings)

    def _tail_width(self, tensor: KvTensor) -> int:
        rule = self.spec.delta_rule
        assert rule is not None, "the layer has one"
        return rule.keys if tensor.kind == "delta_key" else rule.values

    def _appended_decays(self, new: View, tensor: KvTensor) -> View:
        """Past and new decays `[heads, 1, P+AR, 1]`."""
        nodes, heads = self._nodes, [replace(tensor, head=head) for head in range(new.heads)]
        encodings = tuple(self._encoding(each.past) for each in heads)
        integers = nodes.quantize(new.tensor, encodings, tensor.new if new.heads == 1 else f"{tensor.new}.of_all")
        if new.heads > 1:
            nodes.split(integers, [1] * new.heads, 0, [each.new for each in heads])
        together = nodes.add(
            "Concat", [name for each in heads for name in (each.past, each.new)], f"{tensor.past}.all", axis=_ROWS
        )
        stack = nodes.reshape(together, [new.heads, 1, -1, 1])
        return View(nodes.dequantize(stack, encodings, f"{together}.floats"), new.heads, 0, encodings)

    def extended(self, rows: View, new: View, tensor: KvTensor) -> View:
        nodes = self._nodes
        row = nodes.reshape(self._tensor(new), [1, 1, 1, self._tail_width(tensor)])
        integers = nodes.quantize(row, rows.encodings, f"{row}.integers")
        rounded = nodes.dequantize(integers, rows.encodings, f"{row}.cached")
        return self._tail(
            nodes.add("Concat", [rows.tensor, rounded], f"{rows.tensor}.more", axis=_ROWS), rows.encodings
        )

    def row(self, x: View, row: int) -> View:
        found = x if self._ar == 1 else self._cut(x, row, row + 1, _ROWS)
        self._single_rows.add(found.tensor)
        return found

    def together(self, rows: list[View], name: str) -> View:
        if len(rows) == 1:
            return rows[0]
        if rows[0].heads:
            key = ("Concat", *(row.tensor for row in rows))
            joined = self._once(key, lambda: self._nodes.add("Concat", key[1:], f"{name}.rows", axis=_ROWS))
        else:
            joined = self._nodes.add("Concat", [self._tensor(row) for row in rows], f"{name}.rows", axis=1)
        return replace(rows[0], tensor=joined)

    def columns(self, x: View, stop: int) -> View:
        found = self._cut(x, 0, CHECKPOINT_TOKENS + stop, -1)
        if x.tensor in self._single_rows:
            self._single_rows.add(found.tensor)
        return found

    def new_columns(self, x: View) -> View:
        return self._cut(x, CHECKPOINT_TOKENS, _MOST, -1)

    def _cut(self, x: View, first: int, stop: int, axis: int) -> View:
        """A slice of all heads."""
        bounds = [self._nodes.integers([at]) for at in (first, stop, axis)]
        key = ("cut", x.tensor, first, stop, axis)
        return replace(
            x, tensor=self._once(key, lambda: self._nodes.add("Slice", [x.tensor, *bounds], f"{x.tensor}.slice"))
        )

    def decay_sums(self, rows: View, name: str) -> View:
        def summed() -> View:
            each = self._nodes.reshape(rows.tensor, [rows.heads, 1, 1, -1])
            if self._ar > 1:
                each = self._nodes.add("Mul", [each, self._ones("seen")], f"{rows.tensor}.seen")
            return self._rounded(self._multiply(each, self._after(), self._ar), name, rows.heads)

        return replace(self._once(("sums", rows.tensor), summed), head=rows.head)

    def decays(self, sums: View, name: str) -> tuple[View, View]:
        found = self._each("Exp", [sums], name)
        rows, start = self._cut(found, 0, -1, -1), self._cut(found, -1, _MOST, -1)
        if self._ar > 1:
            key = ("seen", rows.tensor)
            seen = self._once(key, lambda: self._nodes.add("Mul", [rows.tensor, self._ones("seen")], f"{name}.seen"))
            rows = replace(rows, tensor=seen)
        return rows, start

    def between_blocks(self, system: View, size: int) -> View:
        key = ("between", system.tensor, size)
        inputs = [system.tensor, self._ones(f"between_{size}")]
        return replace(
            system, tensor=self._once(key, lambda: self._nodes.add("Mul", inputs, f"{system.tensor}.between"))
        )

    def from_identity(self, x: View, name: str) -> View:
        def subtracted() -> View:
            return self._rounded(self._nodes.add("Sub", [self._ones("identity"), x.tensor], name), name, x.heads)

        return replace(self._once(("identity", x.tensor), subtracted), head=x.head)

    def observe_known(self, wanted: View, correction: View, name: str) -> None:
        """Nothing: encodings are chosen."""

    def _ones(self, kind: str) -> str:
        """A constant of 0 and 1 with a row for each new token."""
        ar, past = self._ar, CHECKPOINT_TOKENS
        if kind == "seen":
            values = np.tri(ar, past + ar, past, dtype=np.float32)
        elif kind == "identity":
            values = np.eye(ar, dtype=np.float32)
        else:
            values = between_blocks(ar, int(kind.removeprefix("between_")))
        rounded = SHARES.dequantize(SHARES.quantize(values))[None, None]
        return self._for_tokens(self._nodes.constant(rounded, f"{kind}_{ar}"), past if kind == "seen" else 0, 0)

    def _after(self) -> str:
        """See `rows_after`."""
        count = CHECKPOINT_TOKENS + self._ar
        if not self._takes_fewer:
            return self._nodes.constant(rows_after(count)[None, None], f"after_{count}")
        after = self._nodes.constant(rows_after(count)[None, None, :, :-1], f"after_{count}")
        after = self._for_tokens(after, CHECKPOINT_TOKENS, CHECKPOINT_TOKENS)
        last = self._nodes.constant(np.ones((1, 1, count, 1), np.float32), f"after_{count}.last")
        last = self._for_tokens(last, None, CHECKPOINT_TOKENS)
        return self._once(("after",), lambda: self._nodes.add("Concat", [after, last], "after.all", axis=-1))

    def _for_tokens(self, constant: str, more_columns: int | None, more_rows: int) -> str:
        """A constant for AR tokens, cut for as many as there are, besides more rows and columns; None for all."""
        if not self._takes_fewer:
            return constant
        nodes = self._nodes

        def cut() -> str:
            zero = nodes.integers([0])
            axis = _AXES_OF_TOKENS[self._ports.entry.kind or "hidden"]
            tokens = self._once(
                ("tokens",),
                lambda: nodes.add("Shape", [self._ports.entry.name], "tokens", start=axis, end=axis + 1),
            )
            rows = nodes.add("Add", [tokens, nodes.integers([more_rows])], f"{constant}.stop")
            found = nodes.add(
                "Slice", [constant, nodes.integers([0]), rows, nodes.integers([_ROWS])], f"{constant}.cut"
            )
            if more_columns is None:
                return found
            stop = nodes.add("Add", [tokens, nodes.integers([more_columns])], f"{constant}.stop")
            return nodes.add("Slice", [found, zero, stop, nodes.integers([3])], f"{constant}.cut")

        return self._once(("for tokens", constant), cut)

    def _stack_product(self, left: View, right: View, name: str) -> View:
        """The product of two stacks of floats."""
        heads = max(left.heads, right.heads)

        def product() -> View:
            factors = [self._repeated(each, heads) for each in (left, right)]
            rows = 1 if left.tensor in self._single_rows else self._ar
            return self._rounded(self._multiply(factors[0], factors[1], rows), name, heads)

        found = self._once(("product", left.tensor, right.tensor), product)
        return replace(found, head=(left if left.heads == heads else right).head)

    def _repeated(self, x: View, heads: int) -> str:
        """A stack with each head as often as heads share it."""
        if x.heads in (0, heads):
            return self._tensor(x)
        indices = self._nodes.integers([head // (heads // x.heads) for head in range(heads)])
        key = ("repeated", x.tensor, heads)
        return self._once(key, lambda: self._nodes.add("Gather", [x.tensor, indices], f"{x.tensor}.repeated", axis=0))

    def _operand(self, values: View) -> View:
        """Floats as the second operand of a product."""
        return values

    def _is_cached(self, values: View) -> bool:
        """Whether these are integers of keys or values."""
        return values.tensor in self._integers

    def _tail_heads(self, x: str, heads: int, width: int) -> str:
        """`[1, 1, rows, heads * width]` to `[heads, 1, rows, width]`, which are floats of the tail too."""
        stack = self._nodes.transpose(self._nodes.reshape(x, [1, -1, heads, width]), 2, 0, 1, 3)
        self._tails.add(stack)
        return stack

    def _apart(self, product: str, heads: int) -> str:
        """A product of the rows of groups as a stack of heads."""
        return self._nodes.reshape(product, [heads, 1, -1, 0])

    def _dequantized(self, cached: View) -> str:
        """The floats of past and new rows."""
        name = f"{cached.tensor}.floats"
        return self._once((name,), lambda: self._nodes.dequantize(cached.tensor, cached.encodings, name))

    def _multiply(self, left: str, right: str, rows: int, *, transposed: bool = False) -> str:
        """The product of tensors of four axes: `rows` rows, which are never one where rows must be alike."""
        nodes = self._nodes

        def product(left: str) -> str:
            if transposed:
                return nodes.add("FusedMatMul", [left, right], f"{left}.product", transB=1)
            return nodes.add("MatMul", [left, right], f"{left}.product")

        if not self._batch_invariant or rows > 1:
            return product(left)
        twice = nodes.add("Concat", [left, left], f"{left}.twice", axis=-2)
        return nodes.split(product(twice), [1, 1], -2)[0]

    # ------------------------------------------------------------------ entry and exit

    def entry(self) -> View:
        """The hidden state before the part's first layer, or the rows that a head reads."""
        port = self._ports.entry
        self._rows = port.shape[1] if self._part.embeds else port.shape[2]
        if self._part.embeds:
            return self._rounded(self._embedded(port.name), "embedding")
        encoding = self._port_encoding(port)
        floats = self._nodes.dequantize(port.name, [encoding], f"{port.name}.floats")
        return View(self._nodes.reshape(floats, [1, -1, self.spec.hidden]), encodings=(encoding,))

    def target_hidden(self) -> View:
        encodings = (self._encoding(TARGET_HIDDEN),)
        floats = self._nodes.reshape(self._input(TARGET_HIDDEN), [1, -1, self._decoder.given_hidden])
        return View(floats, encodings=encodings)

    def give_hidden(self, x: View) -> None:
        port = self._ports[LAST_HIDDEN]
        floats = self._nodes.reshape(self._tensor(x), [1, 1, -1, self._decoder.given_hidden])
        self._nodes.quantize(floats, [self._port_encoding(port)], port.name)

    def _embedded(self, ids: str) -> str:
        """The rows of the embedding table for ids, `[1, AR, hidden]`."""
        nodes, spec, (file, *extents) = self._nodes, self.spec, self._table()
        sizes = (TensorProto.INT8, spec.hidden, "integers"), (TensorProto.FLOAT, 1, "scales")
        tables = [
            nodes.external(f"{EMBEDDING}.{name}", element, [spec.vocab, width], file, extent)
            for (element, width, name), extent in zip(sizes, extents, strict=True)
        ]
        integers, scales = (nodes.add("Gather", [table, ids], f"{table}.rows", axis=0) for table in tables)
        rows = nodes.add("Cast", [integers], "embedding.floats", to=TensorProto.FLOAT)
        if EMBEDDING_COLUMNS in self._weights.places.tensors:
            scaled = nodes.add("Mul", [rows, self._floats(EMBEDDING_COLUMNS)], "embedding.columns")
            rows = self._rounded(scaled, "embedding.columns").tensor
        return nodes.add("Mul", [rows, scales], "embedding")

    def select(self, hidden: View) -> View:
        """The row of `hidden` that `logits_index` selects, `[1, 1, hidden]`."""
        self._rows = 1
        tensor = self._nodes.add("Gather", [self._tensor(hidden), LOGITS_INDEX], "selected", axis=1)
        return replace(hidden, tensor=tensor)

    def give(self, result: View) -> None:
        """Make a result the last output, `[1, rows, vocab]` or `[1, 1, AR, hidden]`."""
        port = self._ports.exit
        encoding = self._encoding("head") if port.name == LOGITS else self._port_encoding(port)
        floats = self._tensor(result)
        if port.name != LOGITS:
            floats = self._nodes.reshape(floats, [1, 1, -1, self.spec.hidden])
        self._nodes.quantize(floats, [encoding], port.name)

    def _port_encoding(self, port: Port) -> Encoding:
        assert port.encoding is not None, "hidden states are integers"
        if port.kind == "embeddings":
            return self._encoding("embedding")
        if port.kind == "hidden":
            layer = int(port.name.removeprefix("hidden_"))
            return self._encoding(layer_result(self.spec, layer - 1))
        return self._encoding(port.encoding)

    def finish(self) -> onnx.ModelProto:
        """The model."""
        inputs = [self._value_info(port) for port in self._ports.inputs if port.kind != "lora"]
        outputs = [self._value_info(port) for port in self._ports.outputs]
        return self._nodes.model(self._part.name, [*inputs, *self._adapters], outputs)

    @property
    def _reads_used_rows(self) -> bool:
        """Whether past rows and masks may be fewer than the most."""
        return self._batch_invariant

    def _value_info(self, port: Port) -> onnx.ValueInfoProto:
        shape: list[int | str] = [*port.shape]
        if self._takes_fewer and port.kind in _AXES_OF_TOKENS and (self._part.layers or port.kind != "hidden"):
            axis = _AXES_OF_TOKENS[port.kind]
            shape[axis] = f"{OPEN_TOKENS}{shape[axis]}"
        if self._reads_used_rows and port.kind in ("past", "mask"):
            axis = 2 if port.kind == "past" else 3
            shape[axis] = f"{OPEN_ROWS}{shape[axis]}"
        element = helper.np_dtype_to_tensor_dtype(np.dtype(port.dtype))
        info: onnx.ValueInfoProto = helper.make_tensor_value_info(port.name, element, shape)
        return info

    # ------------------------------------------------------------------ helpers

    @property
    def _states(self) -> ConvolutionStates:
        states = self.spec.convolution_states
        assert states is not None, "a layer has some"
        return states

    def _encoding(self, name: str) -> Encoding:
        """The encoding of a result, input or output.

        Raises:
            BundleError: the manifest has none.
        """
        if (found := self._source.manifest.encodings.get(name)) is None:
            folder = self._source.folder
            raise BundleError(
                f"{folder / MANIFEST}: encodings",
                got=f"none of {name}",
                expected="one for each result of the decoder",
                fix=export_again(folder),
            )
        return found

    def _name_of_head(self, name: str, head: int) -> str:
        """The name of another head's result, which heads with the same keys may share."""
        if (layer := _LAYER.search(name)) is not None and _GROUP.search(name):
            return _GROUP.sub(str(head // self.spec.group(int(layer[0]))), name)
        return _HEAD.sub(f".h{head}", name)

    def _once(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """What was made under a key before, or is made now."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found

    def _each(self, op: str, views: Sequence[View], name: str, more: Sequence[str] = (), **attributes: Any) -> View:
        """An operation on each element or row, written once for all heads."""
        stack = max(views, key=lambda view: view.heads)
        tensors = [self._repeated(view, stack.heads) for view in views] + [*more]

        def make() -> View:
            return self._rounded(self._nodes.add(op, tensors, name, **attributes), name, stack.heads)

        found = self._once((op, *tensors), make) if stack.heads else make()
        return replace(found, head=stack.head)

    def _tensor(self, view: View) -> str:
        """The name of a view's tensor."""
        return view.tensor

    def _as(self, x: str, like: View) -> View:
        """A result in the encodings of another."""
        return replace(like, tensor=x)

    def _input(self, name: str) -> str:
        """The floats of an input."""
        port = self._ports[name]
        encoding = self._encoding(port.encoding or name)
        return self._once(("input", name), lambda: self._nodes.dequantize(name, [encoding], f"{name}.floats"))

    def _floats(self, key: str, gain: float = 1.0) -> str:
        """A stored tensor, times a constant."""
        return self._once(
            ("tensor", key, gain), lambda: self._nodes.constant(self._values(key, gain), f"{key}.{gain!r}")
        )

    def _biases(self, key: str, heads: int, gain: float) -> str:
        """The biases of all heads, `[heads, 1, 1, D]`."""
        values = np.stack([self._values(f"{key}.h{head}", gain) for head in range(heads)])
        return self._nodes.constant(values[:, None, None], f"{key}.of_heads")

    def _values(self, key: str, gain: float) -> NDArray[np.float32]:
        return self._weights.places.tensors[key].encoding.times(gain).dequantize(self._weights.tensor(key))

    def _to_heads(self, x: str, heads: int) -> str:
        """`[1, AR, heads * D]` to `[heads, 1, AR, D]`; one row need not move."""
        if self._ar == 1:
            return self._nodes.reshape(x, [heads, 1, 1, -1])
        return self._nodes.transpose(self._nodes.reshape(x, [0, 0, heads, -1]), 2, 0, 1, 3)

    def _from_heads(self, stack: View) -> str:
        """`[heads, 1, AR, D]` to `[1, AR, heads * D]`."""
        if self._ar == 1:
            return self._nodes.reshape(stack.tensor, [1, 1, -1])
        return self._nodes.reshape(self._nodes.transpose(stack.tensor, 1, 2, 0, 3), [0, 0, -1])
