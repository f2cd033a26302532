"""The CPU's graph of a prompt: attention in blocks of rows, each over the columns that it can see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from edgekv.graphs.floats import GATE_AND_UP, FloatOps, Projection
from edgekv.graphs.processor import multiplies_integers
from edgekv.graphs.stacks import View
from edgekv.spec import FLOAT, KvTensor, hidden_name

_BLOCK_ROWS = 128
"""Rows of a block. Fewer skip more of what no row sees, but take more nodes."""


class WideOps(FloatOps):
    """A block's rows see no new token behind its last one, so those columns are neither multiplied nor summed.

    The first of n blocks over nothing but new tokens reads an n-th of the columns, the last one all of them. From
    scores to results of attention, the queries that share keys are rows of one stack, `[kv_heads, 1, group * rows,
    columns]`. Gates and what they multiply are products of their own, so that no result is divided.
    """

    _layer = 0
    """The layer that is under construction."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """As `FloatOps`. Hidden states stay floats where a bundle's graphs may not be divided."""
        super().__init__(*args, **options)
        source = self._source
        exported = {part.name for graph in source.manifest.graphs for part in graph.parts}
        layers = range(self.spec.layers + (source.graph.parts[-1].name not in exported))
        self._ports = self._ports.with_float_hidden(hidden_name(layer) for layer in layers)

    def entry(self) -> View:
        hidden = super().entry()
        if self._ports.entry.dtype != FLOAT or not self._part.layers:
            return hidden
        # A norm that includes a sum rounds in another order than a norm alone: where layers are divided changes no bit.
        nothing = self._nodes.add("Mul", [hidden.tensor, self._nodes.number(0)], "nothing")
        return self.add(hidden, View(nothing), "hidden")

    def _together(self, weight: str) -> tuple[Projection, ...]:
        together = super()._together(weight)
        if not multiplies_integers():  # decode graphs read the same blocks
            return together
        own = Projection.of(weight)
        return together if own is None or own.name.rpartition(".")[2] not in GATE_AND_UP else (own,)

    def append_to_cache(self, new: View, tensor: KvTensor) -> View:
        self._layer = tensor.layer
        return super().append_to_cache(new, tensor)

    def scores(self, query: View, keys: View, name: str) -> View:
        if keys.tensor in self._tails:
            return super().scores(query, keys, name)

        def scored() -> View:
            rows = self._blocks_of(query.tensor)
            columns = self._seen(self._dequantized(keys))
            blocks = []
            for block, seen in zip(rows, columns, strict=True):
                left, count = self._rows_of_groups(replace(query, tensor=block), keys)
                blocks.append(self._multiply(left, seen, count, transposed=True))
            return View(blocks[0], query.heads, blocks=tuple(blocks))

        return replace(self._once(("scores", query.tensor, keys.tensor), scored), head=query.head)

    def masked(self, scores: View, layer: int, name: str) -> View:
        mask = self._input(self._decoder.mask(layer))
        group = self.spec.group(layer)

        def blocks() -> tuple[str, ...]:
            seen = [self._slice(rows, 3, end) for rows, end in zip(self._blocks_of(mask), self._ends(), strict=True)]
            if group == 1:
                return tuple(seen)
            return tuple(self._nodes.add("Concat", [rows] * group, f"{rows}.of_group", axis=2) for rows in seen)

        return self._each("Add", [scores, View(mask, blocks=self._once(("blocks of", mask, group), blocks))], name)

    def attend(self, weights: View, values: View, name: str) -> View:
        if not self._is_cached(values):
            return super().attend(weights, values, name)

        def attended() -> View:
            products = []
            for block, seen in zip(weights.blocks, self._seen(self._dequantized(values)), strict=True):
                rows = weights.heads // values.heads * self._ar
                products.append(self._apart(self._multiply(block, seen, rows), weights.heads))
            return View(self._nodes.add("Concat", products, name, axis=2), weights.heads)

        return replace(self._once(("attend", weights.tensor, values.tensor), attended), head=weights.head)

    def _each(self, op: str, views: Sequence[View], name: str, more: Sequence[str] = (), **attributes: Any) -> View:
        first = next((view for view in views if view.blocks), None)
        if first is None:
            return super()._each(op, views, name, more, **attributes)

        def make() -> View:
            parts = zip(*(view.blocks for view in views), strict=True)
            blocks = tuple(self._nodes.add(op, [*part, *more], name, **attributes) for part in parts)
            return View(blocks[0], first.heads, blocks=blocks)

        return replace(self._once((op, *(view.tensor for view in views)), make), head=first.head)

    # ------------------------------------------------------------------ blocks

    @property
    def _count(self) -> int:
        """The number of blocks; with fewer tokens than AR the last ones are empty."""
        return -(-self._ar // _BLOCK_ROWS)

    def _blocks_of(self, x: str) -> list[str]:
        """The rows of each block of a tensor with rows in its third axis."""
        if self._count == 1:
            return [x]
        bounds = [self._nodes.integers([at * _BLOCK_ROWS]) for at in range(self._count + 1)]
        axis = self._nodes.integers([2])
        return [self._nodes.add("Slice", [x, *pair, axis], f"{x}.block") for pair in pairwise(bounds)]

    def _seen(self, rows: str) -> list[str]:
        """The past and new rows that each block sees: the last one all of them."""
        return self._once(("seen", rows), lambda: [self._slice(rows, 2, end) for end in self._ends()])

    def _ends(self) -> list[str | None]:
        """How many columns of the layer each block sees, `[1]`; None for all of them."""
        mask = self._decoder.mask(self._layer)
        nodes = self._nodes

        def ends() -> list[str | None]:
            rows, columns = (nodes.add("Shape", [mask], f"{mask}.size", start=axis, end=axis + 1) for axis in (2, 3))
            past = nodes.add("Sub", [columns, rows], f"{mask}.past")
            sums = ([past, nodes.integers([at * _BLOCK_ROWS])] for at in range(1, self._count))
            return [*(nodes.add("Add", terms, f"{mask}.end") for terms in sums), None]

        return self._once(("ends", mask), ends)

    def _slice(self, x: str, axis: int, end: str | None) -> str:
        """The first elements along an axis."""
        if end is None:
            return x
        return self._nodes.add("Slice", [x, self._nodes.integers([0]), end, self._nodes.integers([axis])], f"{x}.seen")
