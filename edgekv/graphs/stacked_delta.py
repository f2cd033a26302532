"""The operations of gated delta rules and Mamba-2 for a CPU: one node computes all heads of a layer."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import numpy as np

from edgekv.bundle import BundleWeights
from edgekv.graphs.delta_rule import (
    SHARES,
    UNIT_EPS,
    DeltaOps,
    between_blocks,
    gives_rows_by_step,
    rows_after,
    unit_encoding,
)
from edgekv.graphs.stacks import HeadStacks, View
from edgekv.spec import CHECKPOINT_TOKENS, DecoderSpec, GraphRecord, KvTensor, part_name
from quant import Encoding

_SWAPPED = (0, 1, 3, 2)
_ROWS = 2  # axis of [1, 1, rows, width]
_MAX_INDEX = np.iinfo(np.int64).max


class StackedDelta(HeadStacks, DeltaOps[View]):
    """What `DeltaOps` asks besides the operations of other decoders.

    Attributes:
        spec: the decoder.
    """

    def __init__(
        self, spec: DecoderSpec, graph: GraphRecord, weights: BundleWeights, *, takes_fewer: bool, batch_invariant: bool
    ) -> None:
        """Start without nodes.

        Args:
            graph: the graph to build.
            weights: of the bundle.
            takes_fewer: whether steps can have fewer tokens than AR.
            batch_invariant: whether the bits of a row must not depend on how many others there are.
        """
        super().__init__(weights, graph.ar, batch_invariant=batch_invariant)
        self.spec = spec
        self._graph = graph
        self._takes_fewer = takes_fewer
        self._single_rows: set[str] = set()
        self._tails: set[str] = set()
        """Floats of a tail, or of the matrices at its checkpoint: they have other rows than the new tokens."""

    @abstractmethod
    def _encoding(self, name: str) -> Encoding:
        """The encoding of a result, input or output."""

    @abstractmethod
    def _tokens(self) -> str:
        """The number of tokens of a step, `[1]`."""

    def scores(self, query: View, keys: View, name: str) -> View:
        if keys.tensor not in self._tails:
            return super().scores(query, keys, name)
        turned = self._once(("turned", keys.tensor), lambda: self._nodes.transpose(keys.tensor, *_SWAPPED))
        return self._stack_product(query, replace(keys, tensor=turned), name)

    @property
    def new_rows(self) -> int:
        return min(self._ar, CHECKPOINT_TOKENS)

    @property
    def by_row(self) -> bool:
        return gives_rows_by_step(self._graph)

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

    def shift(self, x: View, weight: str, name: str) -> View:
        return self._each("Add", [x], name, [self._floats(weight)])

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
        encodings = tuple(self._encoding(head.past) for head in heads)
        integers = nodes.quantize(new.tensor, encodings, tensor.new if new.heads == 1 else f"{tensor.new}.of_all")
        if new.heads > 1:
            nodes.split(integers, [1] * new.heads, 0, [head.new for head in heads])
        together = nodes.add(
            "Concat", [name for head in heads for name in (head.past, head.new)], f"{tensor.past}.all", axis=_ROWS
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
        single = x if self._ar == 1 else self._cut(x, row, row + 1, _ROWS if x.heads else 1)
        self._single_rows.add(single.tensor)
        return single

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
        cut = self._cut(x, 0, CHECKPOINT_TOKENS + stop, -1)
        if x.tensor in self._single_rows:
            self._single_rows.add(cut.tensor)
        return cut

    def new_columns(self, x: View) -> View:
        return self._cut(x, CHECKPOINT_TOKENS, _MAX_INDEX, -1)

    def _cut(self, x: View, first: int, stop: int, axis: int) -> View:
        """A slice of all heads."""
        bounds = [self._nodes.integers([at]) for at in (first, stop, axis)]
        key = ("cut", x.tensor, first, stop, axis)
        return replace(
            x, tensor=self._once(key, lambda: self._nodes.add("Slice", [x.tensor, *bounds], f"{x.tensor}.slice"))
        )

    def decay_sums(self, rows: View, name: str) -> View:
        def summed() -> View:
            return self._rounded(self._multiply(self.across(rows).tensor, self._after(), self._ar), name, rows.heads)

        return replace(self._once(("sums", rows.tensor), summed), head=rows.head)

    def across(self, rows: View) -> View:
        def seen() -> str:
            changes = self._nodes.reshape(rows.tensor, [rows.heads, 1, 1, -1])
            if self._ar == 1:
                return changes
            return self._nodes.add("Mul", [changes, self._ones("seen")], f"{rows.tensor}.seen")

        return replace(rows, tensor=self._once(("across", rows.tensor), seen))

    def decays(self, sums: View, name: str) -> tuple[View, View]:
        powers = self._each("Exp", [sums], name)
        rows, start = self._cut(powers, 0, -1, -1), self._cut(powers, -1, _MAX_INDEX, -1)
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

    def observe_known(self, target: View, correction: View, name: str) -> None:
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
            tokens = self._tokens()
            rows = nodes.add("Add", [tokens, nodes.integers([more_rows])], f"{constant}.stop")
            cut_rows = nodes.add(
                "Slice", [constant, nodes.integers([0]), rows, nodes.integers([_ROWS])], f"{constant}.cut"
            )
            if more_columns is None:
                return cut_rows
            stop = nodes.add("Add", [tokens, nodes.integers([more_columns])], f"{constant}.stop")
            return nodes.add("Slice", [cut_rows, zero, stop, nodes.integers([3])], f"{constant}.cut")

        return self._once(("for tokens", constant), cut)

    def _stack_product(self, left: View, right: View, name: str) -> View:
        """The product of two stacks of floats."""
        heads = max(left.heads, right.heads)

        def product() -> View:
            factors = [self._repeated(factor, heads) for factor in (left, right)]
            rows = 1 if left.tensor in self._single_rows else self._ar
            return self._rounded(self._multiply(factors[0], factors[1], rows), name, heads)

        product_view = self._once(("product", left.tensor, right.tensor), product)
        return replace(product_view, head=(left if left.heads == heads else right).head)

    def _operand(self, values: View) -> View:
        """Floats as the second operand of a product."""
        return values

    def _tail_heads(self, x: str, heads: int, width: int) -> str:
        """`[1, 1, rows, heads * width]` to `[heads, 1, rows, width]`, which are floats of the tail too."""
        stack = self._nodes.transpose(self._nodes.reshape(x, [1, -1, heads, width]), 2, 0, 1, 3)
        self._tails.add(stack)
        return stack

    def _divided(self, x: str, heads: int, width: int) -> str:
        return self._tail_heads(x, heads, width) if x in self._tails else super()._divided(x, heads, width)
