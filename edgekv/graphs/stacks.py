"""Operations whose heads are one tensor, and one node computes all of them.

Blocks are written head by head. The first head that asks for an operation has it written for all heads; the others get
views of the same result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import BundleWeights
from edgekv.graphs.nodes import Nodes
from quant import Encoding

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class View:
    """A result: a tensor `[1, AR, width]`, or one head of a stack `[heads, 1, AR, width]`.

    Attributes:
        tensor: its name.
        heads: of the stack; 0 if there is none.
        head: its number in the stack.
        encodings: of its integers, one for each head.
    """

    tensor: str
    heads: int = 0
    head: int = 0
    encodings: tuple[Encoding, ...] = ()


class HeadStacks(ABC):
    """What decoders and encoders have in common: operations on stacks of heads, and on tensors without heads."""

    def __init__(self, weights: BundleWeights, rows: int, *, batch_invariant: bool = False) -> None:
        """Start without nodes.

        Args:
            weights: of the bundle.
            rows: of activations: AR, or the patches of a picture.
            batch_invariant: whether the bits of a row must not depend on how many others there are.
        """
        self._weights = weights
        self._ar = rows
        self._batch_invariant = batch_invariant
        self._nodes = Nodes()
        self._made: dict[tuple[object, ...], Any] = {}

    @abstractmethod
    def _rounded(self, x: str, name: str, heads: int = 0) -> View:
        """A result, in the encodings of its name."""

    @abstractmethod
    def _by_keys(self, query: View, keys: View) -> str:
        """`query @ keys.T`, as softmax and the mask read it."""

    @abstractmethod
    def _by_values(self, weights: View, values: View) -> str:
        """`weights @ values`, of all heads of `weights`."""

    # ------------------------------------------------------------------ operations on each element or row

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

    def exact_gelu(self, x: View, name: str) -> View:
        return self._each("Gelu", [x], name)

    def softmax(self, x: View, name: str) -> View:
        return self._each("Softmax", [x], name, axis=-1)

    def split(self, x: View, widths: Sequence[int]) -> list[View]:
        if not x.heads:  # into heads: nothing else that has none is divided
            stack = self._once(("heads", x.tensor), lambda: self._divided(self._tensor(x), len(widths), widths[0]))
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

    def swap_halves(self, x: View, half: int) -> View:
        first, last = (part.tensor for part in self.split(x, [half, half]))
        key = ("Concat", last, first)
        tensor = self._once(key, lambda: self._nodes.add("Concat", key[1:], f"{x.tensor}.swapped", axis=-1))
        return replace(x, tensor=tensor)

    def join(self, parts: list[View], name: str) -> View:
        if parts[0].heads and {part.tensor for part in parts} == {parts[0].tensor}:
            return View(self._from_heads(parts[0]), encodings=parts[0].encodings[:1])
        return self._each("Concat", parts, name, axis=-1)

    # ------------------------------------------------------------------ attention

    def scores(self, query: View, keys: View, name: str) -> View:
        def scored() -> View:
            return self._rounded(self._by_keys(query, keys), name, query.heads)

        return replace(self._once(("scores", query.tensor, keys.tensor), scored), head=query.head)

    def attend(self, weights: View, values: View, name: str) -> View:
        def attended() -> View:
            return self._rounded(self._by_values(weights, values), name, weights.heads)

        return replace(self._once(("attend", weights.tensor, values.tensor), attended), head=weights.head)

    # ------------------------------------------------------------------ helpers

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

    def _repeated(self, x: View, heads: int) -> str:
        """A stack with each head as often as heads share it."""
        if x.heads in (0, heads):
            return self._tensor(x)
        indices = self._nodes.integers([head // (heads // x.heads) for head in range(heads)])
        key = ("repeated", x.tensor, heads)
        return self._once(key, lambda: self._nodes.add("Gather", [x.tensor, indices], f"{x.tensor}.repeated", axis=0))

    def _each(self, op: str, views: Sequence[View], name: str, more: Sequence[str] = (), **attributes: Any) -> View:
        """An operation on each element or row, written once for all heads."""
        stack = max(views, key=lambda view: view.heads)
        tensors = [self._repeated(view, stack.heads) for view in views] + [*more]

        def make() -> View:
            return self._rounded(self._nodes.add(op, tensors, name, **attributes), name, stack.heads)

        view = self._once((op, *tensors), make) if stack.heads else make()
        return replace(view, head=stack.head)

    def _once(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """What was made under a key before, or is made now."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def _tensor(self, view: View) -> str:
        """The name of a view's tensor."""
        return view.tensor

    def _as(self, x: str, like: View) -> View:
        """A result in the encodings of another."""
        return replace(like, tensor=x)

    def _unit_weights(self, width: int) -> str:
        ones = np.ones(width, np.float32)
        return self._once(("ones", width), lambda: self._nodes.constant(ones, f"ones_{width}"))

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

    def _divided(self, x: str, heads: int, width: int) -> str:
        """A tensor as a stack of heads of this width."""
        return self._to_heads(x, heads)
