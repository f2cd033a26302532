"""The CPU's graph of a decode step whose attention is one node, which appends to the cache itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from edgekv.graphs.floats import QKV, QUERY, VALUE, FloatOps, Projection
from edgekv.graphs.products import Rows
from edgekv.graphs.stacks import View
from edgekv.spec import KINDS, OPEN_ROWS, DecoderSpec, Kind, KvTensor, Port, cache_stack
from quant import WEIGHT_TYPES, Grid, QuantizedWeight

_CACHE_BITS = 8
_PAIRS_MULTIPLE = 8  # of a rotary embedding within the node
_OUTPUT = "self_attn.o_proj"


class AppendingOps(FloatOps):
    """Keys, and values, of a layer are one tensor `[1, kv_heads, rows, D]`, which is an input and an output in place.

    `GroupQueryAttention` rounds the new row as the cache stores it, writes it behind the past ones, and multiplies
    integers as they are: the past is not copied, and there are no floats of it. Every past row is visible; the width
    of the mask tells how many there are. Queries, keys and values stay rows `[1, 1, heads * D]`, without stacks, unless
    something reads each head. Then the node rotates them too, and in `fast` the scales of the cache are part of the
    matrices before and behind it: the node multiplies integers alone.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """As `FloatOps`."""
        super().__init__(*args, **options)
        self._flat: dict[str, int] = {}
        """Tensors `[1, 1, heads * D]` in views of heads, and how many these are."""
        self._new: dict[str, tuple[KvTensor, str]] = {}
        """By the name of a view of the cache, its first head and the floats of the new row."""
        self._stacks: set[str] = set()
        self._queries: set[str] = set()

    # ------------------------------------------------------------------ rows of heads

    def _by_head(self, x: View, weight: str, name: str, bias: str | None, gain: float) -> View:
        projection = Projection.of(weight)
        if projection is None or not self._stays_flat([projection]):
            return super()._by_head(x, weight, name, bias, gain)
        return self._projected_heads(x, [projection])[weight]

    def _projected_heads(self, x: View, projections: Sequence[Projection]) -> dict[str, View]:
        if not self._stays_flat(projections):
            return super()._projected_heads(x, projections)
        width, heads = self.spec.of_layer(projections[0].layer).head_dim, self._heads_of(projections)
        product = self._together_product(x, projections)
        parts = self._nodes.split(product, [count * width for count in heads], -1)
        self._flat |= zip(parts, heads, strict=True)
        return {
            f"{projection.key}.weight": View(part, count)
            for projection, part, count in zip(projections, parts, heads, strict=True)
        }

    def _stays_flat(self, projections: Sequence[Projection]) -> bool:
        """Whether nothing but a rotary embedding reads single heads of these projections."""
        spec, lora = self.spec, self._decoder.lora
        if any(projection.name not in QKV for projection in projections):
            return False
        has_norm = spec.qk_norm_of(projections[0].layer) is not None or spec.value_norm
        return not has_norm and (lora is None or all(QKV[projection.name] not in lora for projection in projections))

    def _turned(self, x: str, layer: int, width: int, name: str) -> str:
        if x not in self._flat:
            return super()._turned(x, layer, width, name)
        nodes, rotary, heads = self._nodes, self._decoder.rotary_of(layer), self._flat[x]
        assert rotary is not None, "the decoder rotates only layers that have an embedding"
        inputs = [x, nodes.integers([0]), *self._rotary_tables(rotary)]
        turned = nodes.add("RotaryEmbedding", inputs, name, interleaved=0, num_heads=heads, rotary_embedding_dim=width)
        self._flat[turned] = heads
        return turned

    def _from_heads(self, stack: View) -> str:
        return stack.tensor if stack.tensor in self._flat else super()._from_heads(stack)

    # ------------------------------------------------------------------ what the node of attention takes over

    def _is_plain(self, layer: int) -> bool:
        """Whether queries, keys and values of a layer are products alone, but for biases."""
        spec = self.spec
        return spec.qk_norm_of(layer) is None and not spec.value_norm and self._decoder.lora is None

    def rotate(self, spec: DecoderSpec, layer: int, x: View, name: str, heads: int = 1) -> View:
        return x if self._rotates(layer) else super().rotate(spec, layer, x, name, heads)

    def _rotates(self, layer: int) -> bool:
        """Whether the node rotates queries and keys."""
        rotary = self._decoder.rotary_of(layer)
        return rotary is not None and self._is_plain(layer) and rotary.pairs % _PAIRS_MULTIPLE == 0

    def _rotation(self, layer: int) -> list[str]:
        """The inputs for the rotary embedding: tables with a row for each token, of which it reads the first one."""
        rotary = self._decoder.rotary_of(layer)
        if rotary is None or not self._rotates(layer):
            return []
        nodes = self._nodes

        def made() -> list[str]:
            sizes = nodes.add("Concat", [self._columns(), nodes.integers([rotary.pairs])], "rotary.size", axis=0)
            rows = self._rotary_tables(rotary)
            # The node wants as many rows as there are tokens.
            return [nodes.add("Expand", [row, sizes], f"{row}.rows") for row in rows]

        first = nodes.constant(np.zeros((1, 1), np.int64))
        return [*self._once(("rotation tables", *rotary.names), made), first]

    def _matrix(self, key: str) -> QuantizedWeight:
        weight, gains = super()._matrix(key), self._column_gains(key)
        if gains is None:
            return weight
        grid = weight.grid
        return QuantizedWeight(weight.integers, Grid(grid.dtype, grid.scales * gains, grid.block_scales))

    def _bias(self, projection: Projection) -> NDArray[np.float32]:
        bias, gains = super()._bias(projection), self._column_gains(f"{projection.key}.weight")
        return bias if gains is None else bias * gains

    def _column_gains(self, key: str) -> NDArray[np.float32] | None:
        """What the columns of a matrix `[out]` are multiplied by, so that the cache's integers are its results."""
        projection = Projection.of(key)
        if projection is None or projection.name not in QKV or not self._has_scaled_matrices(projection.layer):
            return None
        scales = self._cache_scales(projection.layer, "value" if projection.name == VALUE else "key")
        return self._by_query(projection.layer, scales) if projection.name == QUERY else 1 / scales

    def _row_gains(self, key: str) -> NDArray[np.float32] | None:
        projection = Projection.of(key)
        if projection is None or projection.name != _OUTPUT or not self._has_scaled_matrices(projection.layer):
            return None
        return self._by_query(projection.layer, self._cache_scales(projection.layer, "value"))

    def _has_scaled_matrices(self, layer: int) -> bool:
        """Whether the matrices of a layer include the scales of its cache: a block of o_proj reads one value head."""
        place = self._weights.places.matrices.get(f"model.layers.{layer}.{_OUTPUT}.weight")
        if self._mode != "fast" or place is None or not self._is_plain(layer):
            return False
        rows = Rows(_OUTPUT, "tokens", self._ar, is_normal=False, only_bytes=True)
        kind = WEIGHT_TYPES[place.dtype]
        if not self._products.in_blocks(rows, place.rows * place.columns, kind.bits):
            return False
        return (
            self._products.block_rows(rows, kind, self._by_query(layer, self._cache_scales(layer, "value"))) is not None
        )

    def _cache_scales(self, layer: int, kind: Kind) -> NDArray[np.float32]:
        """The scale of each element of the keys, or of the values, of all heads, `[kv_heads * D]`."""
        sizes = self.spec.of_layer(layer)
        heads = [KvTensor(layer, kind, head).past for head in range(sizes.kv_heads)]
        return np.repeat(np.array([self._encoding(head).scale for head in heads], np.float32), sizes.head_dim)

    def _by_query(self, layer: int, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """What belongs to elements of key heads, by elements of query heads."""
        by_head = values.reshape(-1, self.spec.of_layer(layer).head_dim)
        return np.repeat(by_head, self.spec.heads // len(by_head), axis=0).reshape(-1)

    # ------------------------------------------------------------------ attention

    def append_to_cache(self, new: View, tensor: KvTensor) -> View:
        appended = f"{tensor.kind}_{tensor.layer}.appended"
        if appended not in self._new:
            self._new[appended] = tensor, self._from_heads(new)
        return View(appended, new.heads, new.head)

    def scores(self, query: View, keys: View, name: str) -> View:
        """The queries themselves: `attend` computes all."""
        self._queries.add(query.tensor)
        return query

    def masked(self, scores: View, layer: int, name: str) -> View:
        return scores

    def softmax(self, x: View, name: str) -> View:
        """That of a router is one."""
        return x if x.tensor in self._queries else super().softmax(x, name)

    def attend(self, weights: View, values: View, name: str) -> View:
        """The results of queries, which `softmax` left as they were."""
        return replace(
            self._once(("attend", values.tensor), lambda: self._attended(weights, values, name)), head=weights.head
        )

    def _attended(self, query: View, values: View, name: str) -> View:
        layer = self._new[values.tensor][0].layer
        pasts, news, rows, scales = zip(*(self._operands(layer, kind) for kind in KINDS), strict=True)
        tokens, past_tokens = self._tokens_held()
        result, rotation = self._nodes.unique(name), self._rotation(layer)
        rotary = [*rotation, *[""] * (5 - len(rotation))]
        scale_type = "PER_TENSOR" if self._has_scaled_matrices(layer) else "PER_CHANNEL"
        inputs = [self._from_heads(query), *rows, *pasts, past_tokens, tokens, *rotary, *scales]
        self._nodes.write(
            "GroupQueryAttention",
            inputs,
            [result, *news],
            num_heads=query.heads,
            kv_num_heads=values.heads,
            scale=1.0,  # queries are scaled
            do_rotary=int(bool(rotation)),
            kv_cache_bit_width=_CACHE_BITS,
            k_quant_type=scale_type,
            v_quant_type=scale_type,
        )
        self._flat[result] = query.heads
        return View(result, query.heads)

    def _operands(self, layer: int, kind: Kind) -> tuple[str, str, str, str]:
        """Of the keys or the values: past, past with the new row, the floats of that, and scales.

        Scales are `[1, heads, 1, D]`, or one 1 where matrices have them.
        """
        sizes, row = self.spec.of_layer(layer), self._new[f"{kind}_{layer}.appended"][1]
        heads = [KvTensor(layer, kind, head) for head in range(sizes.kv_heads)]
        past, new = cache_stack(head.past for head in heads), cache_stack(head.new for head in heads)
        self._stacks |= {past, new}
        if self._has_scaled_matrices(layer):
            return past, new, row, self._nodes.constant(np.ones(1, np.float32))
        scales = self._cache_scales(layer, kind).reshape(1, len(heads), 1, -1)
        return past, new, row, self._nodes.constant(scales, f"{kind}_{layer}.scales")

    def _tokens_held(self) -> tuple[str, str]:
        """How many tokens the step attends to, `[1]` and int32, and how many of them are in the cache."""
        nodes = self._nodes

        def made() -> tuple[str, str]:
            tokens = nodes.add("Cast", [self._columns()], "columns.int32", to=TensorProto.INT32)
            return tokens, nodes.add("Sub", [tokens, nodes.constant(np.array([1], np.int32))], "past_columns")

        return self._once(("tokens held",), made)

    def _columns(self) -> str:
        """The width of the mask, `[1]`: tokens that the step attends to."""
        mask = self._decoder.mask(self._part.layers[0])
        return self._once(("columns",), lambda: self._nodes.add("Shape", [mask], "columns", start=3, end=4))

    def finish(self) -> onnx.ModelProto:
        self._ports = self._ports.with_cache_stacks(self._stacks)
        return super().finish()

    def _value_info(self, port: Port) -> onnx.ValueInfoProto:
        info = super()._value_info(port)
        if port.name in self._stacks:
            info.type.tensor_type.shape.dim[2].dim_param = f"{OPEN_ROWS}{port.shape[2]}"
        return info
