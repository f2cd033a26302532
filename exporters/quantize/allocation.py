"""Bits where they count: the integer type of each matrix that loses least for the bytes of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.tensors import HEAD, HEAD_TURN, matrices
from exporters.quantize.recipe import Recipe, WeightRule
from quant import WEIGHT_TYPES, WeightDtype

_TYPES: tuple[WeightDtype, ...] = ("lpbq64", "lpbq32", "int4", "int8")
"""Types that a matrix may get. What an error costs behind a layer is measured with the first that its matrices have."""


@dataclass(frozen=True, slots=True)
class Change:
    """A matrix gets another type, which takes more bytes and loses less.

    Attributes:
        tensor: its name.
        dtype: the new type.
        bytes: more than the type before.
        nats: less than the type before, nats a token.
    """

    tensor: str
    dtype: WeightDtype
    bytes: int
    nats: float


@dataclass(frozen=True, slots=True)
class Allocation:
    """A type for each matrix of the layers.

    Attributes:
        types: by name.
        bytes: of these matrices.
        nats: KL divergence from the float model, summed over matrices measured one at a time.
    """

    types: Mapping[str, WeightDtype]
    bytes: int
    nats: float

    def recipe(self, base: Recipe, name: str) -> Recipe:
        """The recipe `base` with these types."""
        rules = [
            WeightRule(tensors=tensor, dtype=dtype, method=base.rule(tensor).method)
            for tensor, dtype in self.types.items()
        ]
        return msgspec.structs.replace(base, name=name, weights=(*base.weights, *rules), mean_bits=None)


@dataclass(frozen=True, slots=True)
class Front:
    """The allocations that lose least for their bytes: the smallest one, and changes in the order of nats per byte.

    Only types on the lower convex hull of a matrix's bytes and nats are among them, so that the first changes always
    gain most.
    """

    smallest: Allocation
    changes: Sequence[Change]

    @classmethod
    def of(cls, spec: DecoderSpec, costs: Mapping[str, Mapping[WeightDtype, float]]) -> Front:
        """The front of a decoder.

        Args:
            spec: the decoder.
            costs: KL divergence if one matrix alone has a type, nats a token, by name and type.
        """
        shapes, types, changes = matrices(spec), dict[str, WeightDtype](), list[Change]()
        total, lost = 0, 0.0
        for tensor, nats in costs.items():
            outputs, inputs = shapes[tensor]
            sizes = {dtype: WEIGHT_TYPES[dtype].matrix_bytes(inputs, outputs) for dtype in nats}
            here = min(nats, key=lambda dtype: (sizes[dtype], nats[dtype]))
            types[tensor], total, lost = here, total + sizes[here], lost + nats[here]
            while slopes := {
                dtype: (nats[here] - nats[dtype]) / (sizes[dtype] - sizes[here])
                for dtype in nats
                if sizes[dtype] > sizes[here] and nats[dtype] < nats[here]
            }:
                best = max(slopes, key=slopes.__getitem__)
                changes.append(Change(tensor, best, sizes[best] - sizes[here], nats[here] - nats[best]))
                here = best
        changes.sort(key=lambda change: change.nats / change.bytes, reverse=True)
        return cls(Allocation(types, total, lost), changes)

    @property
    def largest(self) -> Allocation:
        """The allocation that loses least."""
        return self._after(self.changes)

    def within(self, most_bytes: int) -> Allocation:
        """The allocation within a limit in bytes that loses least; the smallest if none fits."""
        size, chosen, full = self.smallest.bytes, list[Change](), set[str]()
        for change in self.changes:
            if change.tensor in full or size + change.bytes > most_bytes:
                full.add(change.tensor)
                continue
            chosen.append(change)
            size += change.bytes
        return self._after(chosen)

    def losing(self, most_nats: float) -> Allocation:
        """The allocation of fewest bytes that loses at most so much; the largest if none does."""
        nats, count = self.smallest.nats, 0
        while nats > most_nats and count < len(self.changes):
            nats -= self.changes[count].nats
            count += 1
        return self._after(self.changes[:count])

    def _after(self, changes: Sequence[Change]) -> Allocation:
        """The smallest allocation with some of the changes, those of a matrix in order."""
        types = {**self.smallest.types, **{change.tensor: change.dtype for change in changes}}
        more, less = sum(change.bytes for change in changes), sum(change.nats for change in changes)
        return Allocation(types, self.smallest.bytes + more, self.smallest.nats - less)


def possible_types(spec: DecoderSpec, engine: str) -> dict[str, tuple[WeightDtype, ...]]:
    """The types that each matrix of a layer can have, by name.

    Args:
        spec: the decoder.
        engine: that runs them; see `quant.WEIGHT_TYPES`.
    """
    runnable = [dtype for dtype in _TYPES if engine in WEIGHT_TYPES[dtype].engines]
    return {
        name: tuple(dtype for dtype in runnable if inputs % (WEIGHT_TYPES[dtype].block or 1) == 0)
        for name, (_, inputs) in matrices(spec).items()
        if name not in (HEAD, HEAD_TURN)
    }
