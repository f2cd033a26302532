"""The CPU's graph of a prompt: attention in halves of the rows, each over the columns that it can see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from edgekv.graphs.floats import GATE_AND_UP, FloatOps, Projection
from edgekv.graphs.processor import multiplies_integers
from edgekv.graphs.stacks import View
from edgekv.spec import hidden_name

_MAX_WHOLE_ROWS = 128
"""More rows are two halves to attention. Fewer would skip more of what no row sees, but take more nodes."""
_MAX_INDEX = np.iinfo(np.int64).max


class _Half(NamedTuple):
    """Adjacent rows of a window, and the columns that they see.

    Attributes:
        first: the first row, `[1]`; None for 0.
        end: the row behind the last one; None for all rows.
        columns: how many columns they see; None for all.
        mask: the name of their mask, `[1, 1, rows, columns]`.
    """

    first: str | None
    end: str | None
    columns: str | None
    mask: str


class WideOps(FloatOps):
    """Attention to keys of the cache is one node, `Attention`: what it computes of a head stays in the core's cache.

    Of a window's halves, the first one does not read the columns that only the last one sees. A step has at least two
    tokens, so that neither is empty. Caps of scores have nodes of their own. Gates and what they multiply are products
    of their own, so that no result is divided.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """As `FloatOps`. Hidden states stay floats where a bundle's graphs may not be divided."""
        super().__init__(*args, **options)
        source = self._source
        exported = {part.name for graph in source.manifest.graphs for part in graph.parts}
        layers = range(self.spec.layers + (source.graph.parts[-1].name not in exported))
        self._ports = self._ports.with_float_hidden(hidden_name(layer) for layer in layers)
        self._keys: dict[str, View] = {}
        """By the tensor of queries, the keys that they are compared with."""
        self._layers: dict[str, int] = {}
        """By the tensor of queries, their layer."""

    def add(self, a: View, b: View, name: str) -> View:
        """One node: of many rows, a norm that includes the sum takes longer than both do apart."""
        return self._each("Add", [a, b], name)

    def _together(self, weight: str) -> tuple[Projection, ...]:
        together = super()._together(weight)
        if not multiplies_integers():  # decode graphs read the same blocks
            return together
        own = Projection.of(weight)
        return together if own is None or own.name.rpartition(".")[2] not in GATE_AND_UP else (own,)

    # ------------------------------------------------------------------ the last layer

    def _reads_last_row(self, layer: int) -> bool:
        """Whether the head alone reads what is behind the mixers of a layer: of the last token.

        Not in `exact16`, where the rows of a step share ranges: a layer's results are those of all rows.
        """
        spec, part = self.spec, self._part
        if self._mode != "fast" or layer != spec.layers - 1 or part.stop_layer != spec.layers or part.head:
            return False
        reads_all = spec.gives_hidden or spec.target is not None
        return not (reads_all or spec.layer_inputs or spec.picture_layers > layer)

    def read_on(self, x: View, layer: int) -> View:
        if not self._reads_last_row(layer):
            return x
        self._axis = "last row"  # of all products that follow
        tensor = self._tensor(x)
        last = self._once(("last row", tensor), lambda: self._slice(tensor, 1, self._nodes.integers([-1]), None))
        if tensor in self._normal:
            self._normal.add(last)
        return View(last)

    def give(self, result: View) -> None:
        """As many rows as there are tokens: those that nothing reads are 0."""
        layers = self._part.layers
        if not layers or not self._reads_last_row(layers[-1]):
            return super().give(result)
        nodes = self._nodes
        others = nodes.add("Sub", [self._tokens(), nodes.integers([1])], "others")
        pads = nodes.add("Concat", [nodes.integers([0]), others, nodes.integers([0, 0, 0, 0])], "pads", axis=0)
        return super().give(View(nodes.add("Pad", [self._tensor(result), pads], "padded")))

    # ------------------------------------------------------------------ attention

    def scores(self, query: View, keys: View, name: str) -> View:
        """The queries themselves, where `attend` computes all."""
        if not self._is_cached(keys) or self.spec.attention_cap is not None:
            return super().scores(query, keys, name)
        self._keys[query.tensor] = keys
        return query

    def masked(self, scores: View, layer: int, name: str) -> View:
        if scores.tensor not in self._keys:
            return super().masked(scores, layer, name)
        self._layers[scores.tensor] = layer
        return scores

    def softmax(self, x: View, name: str) -> View:
        """That of a router is one."""
        return x if x.tensor in self._keys else super().softmax(x, name)

    def attend(self, weights: View, values: View, name: str) -> View:
        if weights.tensor not in self._keys:
            return super().attend(weights, values, name)
        attended = self._once(("attend", weights.tensor, values.tensor), lambda: self._attended(weights, values, name))
        return replace(attended, head=weights.head)

    def _attended(self, query: View, values: View, name: str) -> View:
        """The results of all queries that something reads, `[heads, 1, rows, D]`."""
        nodes, keys, layer = self._nodes, self._keys[query.tensor], self._layers[query.tensor]

        def of_model(stack: str, heads: int) -> str:
            return nodes.reshape(stack, [1, heads, -1, 0])

        rows = of_model(query.tensor, query.heads)
        cached = [of_model(self._dequantized(view), view.heads) for view in (keys, values)]
        results = []
        is_gated = self.spec.head_gates or self.spec.output_gates  # by all rows
        reads_all = is_gated or not self._reads_last_row(layer)
        for half in self._halves(layer) if reads_all else [self._last(layer)]:
            seen = [self._slice(stack, 2, None, half.columns) for stack in cached]
            inputs = [self._slice(rows, 2, half.first, half.end), *seen, half.mask]
            results.append(nodes.add("Attention", inputs, name, scale=1.0))  # queries are scaled
        together = results[0] if len(results) == 1 else nodes.add("Concat", results, name, axis=2)
        return View(nodes.reshape(together, [query.heads, 1, -1, 0]), query.heads)

    def _last(self, layer: int) -> _Half:
        """The last row of a window, which sees all columns."""
        last = self._nodes.integers([-1])
        return _Half(last, None, None, self._slice(self._input(self._decoder.mask(layer)), 2, last, None))

    def _halves(self, layer: int) -> list[_Half]:
        """The halves of a window's rows."""
        nodes, mask = self._nodes, self._decoder.mask(layer)
        floats = self._input(mask)

        def halves() -> list[_Half]:
            rows, columns = (nodes.add("Shape", [mask], f"{mask}.size", start=axis, end=axis + 1) for axis in (2, 3))
            middle = nodes.add("Div", [rows, nodes.integers([2])], f"{mask}.middle")
            seen = nodes.add("Sub", [columns, nodes.add("Sub", [rows, middle], f"{mask}.last")], f"{mask}.seen")
            first = self._slice(self._slice(floats, 2, None, middle), 3, None, seen)
            return [_Half(None, middle, seen, first), _Half(middle, None, None, self._slice(floats, 2, middle, None))]

        return self._once(("halves", mask), halves) if self._ar > _MAX_WHOLE_ROWS else [_Half(None, None, None, floats)]

    def _slice(self, x: str, axis: int, first: str | None, end: str | None) -> str:
        """The elements along an axis between two places, `[1]`; None for the first and the last one."""
        if first is end is None:
            return x
        bounds = first or self._nodes.integers([0]), end or self._nodes.integers([_MAX_INDEX])
        return self._nodes.add("Slice", [x, *bounds, self._nodes.integers([axis])], f"{x}.slice")
