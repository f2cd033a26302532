"""Bits where they count: the integer type of each matrix that loses least for the bytes of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.tensors import HEAD, HEAD_TURN, matrices
from exporters.quantize.recipe import Recipe, WeightRule
from quant import WEIGHT_TYPES, WeightDtype

_TYPES: tuple[WeightDtype, ...] = ("lpbq64", "lpbq32", "int4", "int8")
"""Types that a matrix may get. What an error costs behind a layer is measured with the first that its matrices have."""

_PRICES = (1e-12, 1e3)
"""Of a microsecond, nats: time counts for nothing, and for all."""
_HALVINGS = 40


@dataclass(frozen=True, slots=True)
class Change:
    """A matrix gets another type, which takes more bytes.

    Attributes:
        tensor: its name.
        dtype: the new type.
        bytes: more than the type before.
        nats: less than the type before, nats a token; below 0 for a type that is chosen for its time.
        us: less than the type before, microseconds a token.
    """

    tensor: str
    dtype: WeightDtype
    bytes: int
    nats: float
    us: float = 0.0


@dataclass(frozen=True, slots=True)
class Allocation:
    """A type for each matrix of the layers, and for the head if it is chosen too.

    Attributes:
        types: by name.
        bytes: of these matrices; see `type_bytes`.
        nats: KL divergence from the float model, summed over matrices measured one at a time.
        us: time of a decoded token, microseconds, summed likewise; relative to that of some types of all.
    """

    types: Mapping[str, WeightDtype]
    bytes: int
    nats: float
    us: float = 0.0

    def recipe(self, base: Recipe, name: str) -> Recipe:
        """The recipe `base` with these types."""
        rules = [
            WeightRule(tensors=tensor, dtype=dtype, method=base.rule(tensor).method)
            for tensor, dtype in self.types.items()
        ]
        return msgspec.structs.replace(base, name=name, weights=(*base.weights, *rules), ends=None, mean_bits=None)


@dataclass(frozen=True, slots=True)
class Front:
    """The allocations that lose least for their bytes: the smallest one, and changes in the order of loss per byte.

    What an allocation loses is its nats, and its microseconds at a price. Only types on the lower convex hull of a
    matrix's bytes and losses are among them, so that the first changes always gain most.
    """

    smallest: Allocation
    changes: Sequence[Change]

    @classmethod
    def of(
        cls,
        spec: DecoderSpec,
        costs: Mapping[str, Mapping[WeightDtype, float]],
        times: Mapping[str, Mapping[WeightDtype, float]] | None = None,
        price: float = 0.0,
    ) -> Front:
        """The front of a decoder.

        Args:
            spec: the decoder.
            costs: KL divergence if one matrix alone has a type, nats a token, by name and type.
            times: microseconds that a matrix adds to a token with a type, likewise; None if time does not matter.
            price: of a microsecond, nats.
        """
        smallest, changes = list[_Choice](), list[Change]()
        for tensor, nats in costs.items():
            choices = [
                _Choice(
                    tensor,
                    dtype,
                    type_bytes(spec, tensor, dtype),
                    nats[dtype],
                    0.0 if times is None else times[tensor][dtype],
                    price,
                )
                for dtype in nats
            ]
            here = min(choices, key=lambda choice: (choice.bytes, choice.loss))
            smallest.append(here)
            while better := [choice for choice in choices if choice.bytes > here.bytes and choice.loss < here.loss]:
                best = max(better, key=lambda larger: (here.loss - larger.loss) / (larger.bytes - here.bytes))
                changes.append(here.change_to(best))
                here = best
        changes.sort(key=lambda change: (change.nats + price * change.us) / change.bytes, reverse=True)
        first = Allocation(
            {least.tensor: least.dtype for least in smallest},
            sum(least.bytes for least in smallest),
            sum(least.nats for least in smallest),
            sum(least.us for least in smallest),
        )
        return cls(first, changes)

    @property
    def largest(self) -> Allocation:
        """The allocation that loses least."""
        return self._after(self.changes)

    def within(self, max_bytes: int) -> Allocation:
        """The allocation within a limit in bytes that loses least; the smallest if none fits."""
        size, chosen, full = self.smallest.bytes, list[Change](), set[str]()
        for change in self.changes:
            if change.tensor in full or size + change.bytes > max_bytes:
                full.add(change.tensor)
                continue
            chosen.append(change)
            size += change.bytes
        return self._after(chosen)

    def losing(self, max_nats: float) -> Allocation:
        """The allocation of fewest bytes that loses at most so many nats; the largest if none does."""
        nats, count = self.smallest.nats, 0
        while nats > max_nats and count < len(self.changes):
            nats -= self.changes[count].nats
            count += 1
        return self._after(self.changes[:count])

    def _after(self, changes: Sequence[Change]) -> Allocation:
        """The smallest allocation with some of the changes, those of a matrix in order."""
        first = self.smallest
        return Allocation(
            {**first.types, **{change.tensor: change.dtype for change in changes}},
            first.bytes + sum(change.bytes for change in changes),
            first.nats - sum(change.nats for change in changes),
            first.us - sum(change.us for change in changes),
        )


@dataclass(frozen=True, slots=True)
class _Choice:
    """A matrix with one of its types."""

    tensor: str
    dtype: WeightDtype
    bytes: int
    nats: float
    us: float
    price: float

    @property
    def loss(self) -> float:
        """Nats, and microseconds at their price."""
        return self.nats + self.price * self.us

    def change_to(self, other: _Choice) -> Change:
        """The same matrix with another type."""
        more, nats, us = other.bytes - self.bytes, self.nats - other.nats, self.us - other.us
        return Change(other.tensor, other.dtype, more, nats, us)


@dataclass(frozen=True, slots=True)
class Fronts:
    """The front of a decoder at every price of a microsecond.

    Attributes:
        spec: the decoder.
        costs: see `Front.of`.
        times: see `Front.of`.
    """

    spec: DecoderSpec
    costs: Mapping[str, Mapping[WeightDtype, float]]
    times: Mapping[str, Mapping[WeightDtype, float]] | None = None

    def at(self, price: float) -> Front:
        """The front at a price, nats a microsecond."""
        return Front.of(self.spec, self.costs, self.times, price)

    def choose(self, choice: Callable[[Front], Allocation], max_us: float = math.inf) -> Allocation:
        """What is chosen at the lowest price at which it takes at most so long; the fastest if none does.

        Args:
            choice: chooses from the front of a price.
            max_us: limit of `Allocation.us`.
        """
        cheapest = choice(self.at(0.0))
        if cheapest.us <= max_us:
            return cheapest
        low, high = _PRICES
        fastest = chosen = choice(self.at(high))
        if fastest.us > max_us:
            return fastest
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            allocated = choice(self.at(middle))
            if allocated.us <= max_us:
                high, chosen = middle, allocated
            else:
                low = middle
        return chosen


def type_bytes(spec: DecoderSpec, tensor: str, dtype: WeightDtype) -> int:
    """Bytes of a matrix with a type. A head counts with the embeddings: a tied one of 8 bits is their table too.

    Args:
        spec: the decoder, with the vocabulary that it has beside a head of 8 bits.
        tensor: the name of the matrix.
        dtype: its type.
    """
    shapes, byte = matrices(spec), WEIGHT_TYPES["int8"]
    outputs, inputs = shapes[tensor]
    size_bytes = WEIGHT_TYPES[dtype].matrix_bytes(inputs, outputs)
    if tensor != HEAD:
        return size_bytes
    if not (spec.shares_vocabulary and dtype == "int8"):
        return size_bytes + byte.matrix_bytes(inputs, outputs)
    return size_bytes + (byte.matrix_bytes(*shapes[HEAD_TURN]) if HEAD_TURN in shapes else 0)


def possible_types(spec: DecoderSpec, engine: str, *, head: bool = False) -> dict[str, tuple[WeightDtype, ...]]:
    """The types that each matrix of a layer can have, by name.

    Args:
        spec: the decoder.
        engine: that runs them; see `quant.WEIGHT_TYPES`.
        head: whether that of the head is chosen too.
    """
    fixed = (HEAD_TURN,) if head else (HEAD, HEAD_TURN)
    runnable = [dtype for dtype in _TYPES if engine in WEIGHT_TYPES[dtype].engines]
    return {
        name: tuple(dtype for dtype in runnable if inputs % (WEIGHT_TYPES[dtype].block or 1) == 0)
        for name, (_, inputs) in matrices(spec).items()
        if name not in fixed
    }
