"""The CPU's graph for speed: the bundle's integers as weights and cache, floats between the operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgekv.bundle import BundleWeights, Extent
from edgekv.graphs.cpu_mode import RenderedMode
from edgekv.graphs.decoder import expert_inner, query_gain, routed
from edgekv.graphs.products import ExpertMatrices, Products, Rows, beside
from edgekv.graphs.source import CHOSEN, PartSource
from edgekv.graphs.stacked_decoder import StackedOps
from edgekv.graphs.stacks import View
from edgekv.graphs.weight_file import WeightFile
from edgekv.spec import (
    CONVOLUTION_INPUTS,
    DELTA_INPUTS,
    HEAD,
    DecoderSpec,
    LoraTarget,
    RotaryInputs,
    expert_projection,
    lora_b,
    table_key,
)
from quant import QuantizedWeight

QUERY, _KEY, VALUE = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
_GATE = "self_attn.g_proj"
QKV: dict[str, LoraTarget] = {QUERY: "q", _KEY: "k", VALUE: "v"}
"""The projections to heads, and their slots for adapters."""
_TOGETHER = ((QUERY, _KEY, VALUE), CONVOLUTION_INPUTS, DELTA_INPUTS, ("mlp.gate_proj", "mlp.up_proj"))
"""Projections of the same activations."""
GATE_AND_UP = "gate_proj", "up_proj"
_EXPERTS = "mlp.experts."


class Projection(NamedTuple):
    """A projection of a layer: `model.layers.{layer}.{name}.weight`."""

    layer: int
    name: str

    @classmethod
    def of(cls, weight: str) -> Projection | None:
        """The projection with this matrix; None for the head."""
        words = weight.removeprefix("model.layers.").split(".")
        return cls(int(words[0]), ".".join(words[1:-1])) if weight.startswith("model.layers.") else None

    @property
    def key(self) -> str:
        """The name of its matrix, without `.weight`."""
        return f"model.layers.{self.layer}.{self.name}"


def _siblings(projection: Projection) -> tuple[Projection, ...]:
    """The projections of the same activations; of an expert, its own alone."""
    expert, _, last = projection.name.rpartition(".")
    if expert.startswith(_EXPERTS) and last in GATE_AND_UP:
        return tuple(Projection(projection.layer, f"{expert}.{name}") for name in GATE_AND_UP)
    names = next((names for names in _TOGETHER if projection.name in names), (projection.name,))
    return tuple(Projection(projection.layer, name) for name in names)


class FloatOps(StackedOps):
    """Results stay float. Keys and values are rounded as the cache stores them.

    - Projections of the same activations are one product.
    - A norm includes the sum before it; SiLU and the rotary embedding are one node each, of all queries and keys.
    - Queries that share keys are rows of one product, and keys are read as the rows that they are stored as.
    - Heads of a single row are not moved, only reshaped.
    """

    def __init__(
        self,
        source: PartSource,
        weights: BundleWeights,
        *,
        mode: RenderedMode,
        file: WeightFile,
        batch_invariant: bool,
    ) -> None:
        """Start with the inputs that all layers share.

        Args:
            source: the part to build.
            weights: of the bundle.
            mode: how activations are rounded in products.
            file: takes the integers as the products read them.
            batch_invariant: whether the bits of a row must not depend on how many others there are.
        """
        super().__init__(source, weights, batch_invariant=batch_invariant)
        is_scoring = source.graph.logit_rows > 1
        self._products = Products(
            self._nodes, file, mode, is_scoring=is_scoring, batch_invariant=batch_invariant, in_groups=True
        )
        self._mode = mode
        self._file = file
        self._normal: set[str] = set()
        self._sums: dict[str, tuple[str, str]] = {}
        """Sums that no node computes yet: the norm that reads one may."""
        self._turning: set[str] = set()
        """Stacks of queries and keys."""
        self._axis = "tokens"
        """What rows of products are, but for those of the head; see `Rows`."""
        self._chosen: list[str] = []
        """By layer, 1 for each expert that a row has chosen, `[E]`."""

    def _table(self) -> tuple[str, Extent, Extent]:
        integers, scales = self._weights.by_rows(table_key(self.spec))
        return self._file.location, self._file.write(integers), self._file.write(scales)

    @property
    def _reads_used_rows(self) -> bool:
        return True

    def _rounded(self, x: str, name: str, heads: int = 0) -> View:
        return View(x, heads)

    def _tensor(self, view: View) -> str:
        if view.tensor in self._sums:
            self._nodes.write("Add", self._sums.pop(view.tensor), [view.tensor])
        return view.tensor

    # ------------------------------------------------------------------ projections

    def linear(
        self, x: View, weight: str, name: str, *, bias: str | None = None, head: int | None = None, gain: float = 1.0
    ) -> View:
        together = self._together(weight)
        if len(together) == 1:
            view = super().linear(x, weight, name, bias=bias, head=head, gain=gain)
            if together[0].name != _GATE or head is None or self._ar > 1:
                return view
            by_group = [self.spec.kv_heads, 1, -1, self.spec.head_dim]  # as results of attention are, see `_apart`
            return replace(
                view, tensor=self._once(("by group", weight), lambda: self._nodes.reshape(view.tensor, by_group))
            )
        project = self._projected_heads if together[0].name in QKV else self._projected
        view = self._once(("together", together), lambda: project(x, together))[weight]
        return view if head is None else replace(view, head=view.head + head)

    def _product(self, x: View, keys: Sequence[str], name: str) -> str:
        matrices = self._weights.places.matrices
        projection = Projection.of(keys[0])
        readers = keys if projection is None else [f"{sibling.key}.weight" for sibling in _siblings(projection)]
        only_bytes = all(matrices[key].dtype == "int8" for key in readers if key in matrices)
        tensor = self._tensor(x)
        is_normal = tensor in self._normal or keys[0] == HEAD
        rows = Rows(tensor, "outputs" if keys[0] == HEAD else self._axis, self._rows, is_normal, only_bytes)
        weight = beside([self._matrix(key) for key in keys])
        return self._products.multiply(rows, weight, keys[0], self._row_gains(keys[0]))

    def _matrix(self, key: str) -> QuantizedWeight:
        """A matrix as its product reads it."""
        return self._weights.matrix(key)

    def _row_gains(self, key: str) -> NDArray[np.float32] | None:
        """What the rows of a matrix `[in]` are multiplied by besides; None for nothing."""
        return None

    def _together(self, weight: str) -> tuple[Projection, ...]:
        """The projections that one product computes."""
        own = Projection.of(weight)
        if own is None:
            return (Projection(0, weight),)
        matrices, lora = self._weights.places.matrices, self._decoder.lora
        dtype = matrices[weight].dtype
        siblings = [sibling for sibling in _siblings(own) if f"{sibling.key}.weight" in matrices]
        alike = [sibling for sibling in siblings if matrices[f"{sibling.key}.weight"].dtype == dtype]
        if own.name in QKV:
            if self.spec.qk_norm_of(own.layer) == "all-heads":
                return (own,)
            has_slot = {name: lora is not None and target in lora for name, target in QKV.items()}
            alike = [sibling for sibling in alike if has_slot[sibling.name] == has_slot[own.name]]
        return tuple(alike)

    def _together_product(self, x: View, projections: Sequence[Projection]) -> str:
        keys = [f"{projection.key}.weight" for projection in projections]
        product = self._product(x, keys, projections[0].key)
        biased = [projection for projection in projections if self._is_biased(projection)]
        if not biased:
            return product
        biases = [self._bias(projection) for projection in projections]
        added = self._nodes.constant(np.concatenate(biases), f"{keys[0]}.biases")
        return self._nodes.add("Add", [product, added], f"{product}.biased")

    def _bias(self, projection: Projection) -> NDArray[np.float32]:
        """The bias of a projection `[out]`; zeros if it has none."""
        spec, key = self.spec, f"{projection.key}.bias"
        place = self._weights.places.matrices[f"{projection.key}.weight"]
        if not self._is_biased(projection):
            return np.zeros(place.columns, np.float32)
        if projection.name not in QKV:
            return self._values(key, 1.0)
        gain = query_gain(spec) if projection.name == QUERY and spec.qk_norm_of(projection.layer) is None else 1.0
        heads = range(place.columns // spec.of_layer(projection.layer).head_dim)
        return np.concatenate([self._values(f"{key}.h{head}", gain) for head in heads])

    def _is_biased(self, projection: Projection) -> bool:
        return projection.name in self.spec.biased or projection.name == DELTA_INPUTS[3]

    def _projected(self, x: View, projections: Sequence[Projection]) -> dict[str, View]:
        product = self._together_product(x, projections)
        widths = [self._weights.places.matrices[f"{projection.key}.weight"].columns for projection in projections]
        parts = self._nodes.split(product, widths, -1)
        return {f"{projection.key}.weight": View(part) for projection, part in zip(projections, parts, strict=True)}

    def _projected_heads(self, x: View, projections: Sequence[Projection]) -> dict[str, View]:
        """Queries, keys or values, or several of them; queries and keys are one stack if they are rotated next."""
        spec, layer = self.spec, projections[0].layer
        names = [projection.name for projection in projections]
        heads = self._heads_of(projections)
        stack = self._to_heads(self._together_product(x, projections), sum(heads))
        if self._decoder.lora is not None and QKV[names[0]] in self._decoder.lora:
            pieces = [lora_b(layer, QKV[name], head) for name, n in zip(names, heads, strict=True) for head in range(n)]
            added = self._multiply(self._reduced(x, layer, QKV[names[0]]), self._adapter(pieces), self._ar)
            stack = self._nodes.add("Add", [stack, added], f"{stack}.adapted")
        if names[:2] != [QUERY, _KEY] or spec.qk_norm_of(layer) is not None or spec.rope_of(layer) is None:
            views = [View(part, n) for part, n in zip(self._nodes.split(stack, heads, 0), heads, strict=True)]
        else:
            queries, keys, *values = heads
            both, *rest = self._nodes.split(stack, [queries + keys, *values], 0)
            self._turning.add(both)
            views = [View(both, queries + keys), View(both, queries + keys, queries)]
            views += [View(part, n) for part, n in zip(rest, values, strict=True)]
        return {f"{projection.key}.weight": view for projection, view in zip(projections, views, strict=True)}

    def _heads_of(self, projections: Sequence[Projection]) -> list[int]:
        """The heads of each projection to queries, keys or values."""
        spec = self.spec
        return [
            spec.heads if projection.name == QUERY else spec.of_layer(projection.layer).kv_heads
            for projection in projections
        ]

    def adapt(self, y: View, x: View, layer: int, target: LoraTarget, name: str, *, head: int | None = None) -> View:
        projection = next((name for name, slot in QKV.items() if slot == target), None)
        if projection is not None and len(self._together(f"{Projection(layer, projection).key}.weight")) > 1:
            return y  # it is adapted with the others
        return super().adapt(y, x, layer, target, name, head=head)

    # ------------------------------------------------------------------ operations that the runtime has

    def add(self, a: View, b: View, name: str) -> View:
        if a.heads or b.heads:
            return super().add(a, b, name)
        total = self._nodes.unique(name)
        self._sums[total] = self._tensor(a), self._tensor(b)
        return View(total)

    def mixture(self, spec: DecoderSpec, layer: int, x: View) -> View:
        """Experts that no row has chosen are not computed.

        Of a single row in `fast`, one node computes all of a layer. Elsewhere, and where experts leave memory, each is
        in a branch with files of its own: those that are skipped leave the same bits as if they were computed. In
        graphs of many rows, an expert reads the rows that have chosen it alone.
        """
        assert spec.experts is not None, "the layer has some"
        nodes, name = self._nodes, f"layers.{layer}.down"
        weights, chosen = routed(self, spec, layer, x)
        rows = nodes.add("ReduceMax", [chosen.tensor, nodes.integers([0, 1])], f"{chosen.tensor}.any", keepdims=0)
        self._chosen.append(rows)
        if self._products.mixes(self._rows) and not self._source.tells_experts:
            key, routing = f"model.layers.{layer}.mlp.experts", (chosen.tensor, weights.tensor)
            matrices = [self._expert_matrices(layer, expert) for expert in range(spec.experts.count)]
            if (mixed := self._products.mix(self._tensor(x), routing, spec.experts.used, matrices, key)) is not None:
                return View(mixed)
        flags = nodes.split(
            nodes.add("Cast", [rows], f"{rows}.flags", to=TensorProto.BOOL), [1] * spec.experts.count, 0
        )
        total = nodes.add("Mul", [self._tensor(x), nodes.number(0)], f"{name}.none")
        gathers = self._products.takes_any(self._rows)
        for expert, flag in enumerate(flags):
            made, of_products = dict(self._made), dict(self._products.made)
            with nodes.branch() as taken:
                read, weight, places = x, self.slice(weights, expert, 1), ""
                if gathers:
                    self._products.made = {}  # of another number of rows
                    places = self._places(chosen, expert)
                    read, weight = (self._gathered(rows, places) for rows in (x, weight))
                inner = expert_inner(self, spec, layer, expert, read)
                weighed = self.multiply(inner, weight, f"layers.{layer}.expert")
                key = f"model.layers.{layer}.{expert_projection(expert, 'down_proj')}.weight"
                down = self._tensor(self.linear(weighed, key, name))
                added = self._added_at(total, down, places) if gathers else nodes.add("Add", [total, down], name)
            self._made, self._products.made = made, of_products  # a branch sees nothing of another one
            total = nodes.either(flag, taken, added, total, name)
        return View(total)

    def _expert_matrices(self, layer: int, expert: int) -> ExpertMatrices:
        return ExpertMatrices(
            *(
                self._weights.matrix(f"model.layers.{layer}.{expert_projection(expert, name)}.weight")
                for name in ("gate_proj", "up_proj", "down_proj")
            )
        )

    def finish(self) -> onnx.ModelProto:
        if not self._source.tells_experts:
            return super().finish()
        assert self.spec.experts is not None, "a layer has some"
        shape = [len(self._chosen), self.spec.experts.count]
        self._nodes.write("Concat", [self._nodes.reshape(rows, [1, -1]) for rows in self._chosen], [CHOSEN], axis=0)
        model = super().finish()
        model.graph.output.append(helper.make_tensor_value_info(CHOSEN, TensorProto.FLOAT, shape))
        return model

    def _places(self, chosen: View, expert: int) -> str:
        """The rows that have chosen an expert, `[rows]`."""
        nodes = self._nodes
        flags = nodes.reshape(self.slice(chosen, expert, 1).tensor, [-1])
        return nodes.reshape(nodes.add("NonZero", [flags], f"{chosen.tensor}.places"), [-1])

    def _gathered(self, x: View, places: str) -> View:
        """Some rows `[1, rows, width]`."""
        rows = self._nodes.add("Gather", [self._tensor(x), places], f"{x.tensor}.chosen", axis=1)
        if x.tensor in self._normal:
            self._normal.add(rows)
        return View(rows)

    def _added_at(self, total: str, rows: str, places: str) -> str:
        """The total `[1, AR, H]` plus some rows `[1, rows, H]` at their places."""
        nodes, width = self._nodes, self.spec.hidden
        flat, added = (nodes.reshape(tensor, [-1, width]) for tensor in (total, rows))
        indices = nodes.reshape(places, [-1, 1])
        summed = nodes.add("ScatterND", [flat, indices, added], f"{rows}.scattered", reduction="add")
        return nodes.reshape(summed, [1, -1, width])

    def rms_norm(self, x: View, weight: str, name: str, *, gain: float = 1.0) -> View:
        gamma = self._floats(weight, gain)
        if x.tensor in self._sums:
            result = self._nodes.unique(name)
            inputs, outputs = [*self._sums.pop(x.tensor), gamma], [result, "", "", x.tensor]
            self._nodes.write("SkipSimplifiedLayerNormalization", inputs, outputs, epsilon=self.spec.eps)
            normalized = View(result)
        else:
            attributes = {"axis": -1, "epsilon": self.spec.eps, "stash_type": 1}
            normalized = self._each("SimplifiedLayerNormalization", [x], name, [gamma], **attributes)
        self._normal.add(normalized.tensor)
        return normalized

    def normalize(self, x: View, width: int, name: str) -> View:
        attributes = {"axis": -1, "epsilon": self.spec.eps, "stash_type": 1}
        return self._each("SimplifiedLayerNormalization", [x], name, [self._unit_weights(width)], **attributes)

    def silu(self, x: View, at: str) -> View:
        return View(self._nodes.add("QuickGelu", [self._tensor(x)], at + "silu", alpha=1.0))

    def rotate(self, spec: DecoderSpec, layer: int, x: View, name: str, heads: int = 1) -> View:
        rope = spec.rope_of(layer)
        if rope is None:
            return x
        width = 2 * (rope.width // 2)
        turned = self._once(("turned", x.tensor), lambda: self._turned(x.tensor, layer, width, name))
        if x.tensor not in self._turning:
            return replace(x, tensor=turned)
        counts = [spec.heads, spec.of_layer(layer).kv_heads]
        queries, keys = self._once(("apart", turned), lambda: self._nodes.split(turned, counts, 0))
        return View(queries, counts[0], x.head) if x.head < counts[0] else View(keys, counts[1], x.head - counts[0])

    def _turned(self, x: str, layer: int, width: int, name: str) -> str:
        nodes, rotary = self._nodes, self._decoder.rotary_of(layer)
        assert rotary is not None, "the decoder rotates only layers that have an embedding"
        tables = self._rotary_tables(rotary)
        rest = self.spec.of_layer(layer).head_dim - width
        first, *still = nodes.split(x, [width, rest], -1) if rest else [x]
        # The first row of the tables is that of the first token.
        turned = nodes.add("RotaryEmbedding", [first, nodes.integers([0]), *tables], name, interleaved=0)
        return nodes.add("Concat", [turned, *still], name, axis=-1) if still else turned

    def _rotary_tables(self, rotary: RotaryInputs) -> list[str]:
        """Cosines and sines, `[AR, R/2]`."""
        return self._once(
            ("tables", *rotary.names),
            lambda: [self._nodes.reshape(self._input(name), [-1, rotary.pairs]) for name in rotary.names],
        )

    # ------------------------------------------------------------------ attention

    def heads_of(self, x: View, count: int) -> list[View]:
        if self._ar > 1:
            return super().heads_of(x, count)
        by_group = [self.spec.kv_heads, 1, -1, 1]  # as results of attention are, see `_apart`
        stack = self._once(("heads", x.tensor), lambda: self._nodes.reshape(self._tensor(x), by_group))
        return [View(stack, count, head) for head in range(count)]

    def _by_keys(self, query: View, keys: View) -> str:
        left, rows = self._rows_of_groups(query, keys)
        product = self._multiply(left, self._dequantized(keys), rows, transposed=True)
        return self._apart(product, query.heads)

    def _by_group(self, x: View, shared: View) -> tuple[str, int]:
        if self._ar == 1:
            return x.tensor, x.heads // shared.heads  # see `_apart`
        return self._rows_of_groups(x, shared)

    def _rows_of_groups(self, x: View, shared: View) -> tuple[str, int]:
        """The queries that share keys or values as rows of one product."""
        group_size = x.heads // shared.heads
        if group_size == 1:
            return x.tensor, self._ar
        return self._nodes.reshape(x.tensor, [shared.heads, 1, -1, 0]), group_size * self._ar

    def _apart(self, product: str, heads: int) -> str:
        # A single row stays a row of its group until heads are joined.
        return product if self._ar == 1 else super()._apart(product, heads)
