"""The CPU's graph that rounds every result as the HTP does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnx import TensorProto

from edgekv.graphs.decoder import folds_heads
from edgekv.graphs.delta_rule import signed_operand
from edgekv.graphs.stacked_decoder import StackedOps
from edgekv.graphs.stacks import View
from quant import WEIGHT_TYPES, Encoding, WeightDtype

_ELEMENTS = {"int8": TensorProto.INT8, "int4": TensorProto.INT4}


class EmulatedOps(StackedOps):
    """Every result is rounded to its encoding: the bits are those of the exported graph, run node by node.

    No sum is taken in another order, unless rows must be alike.
    """

    def _rounded(self, x: str, name: str, heads: int = 0) -> View:
        names = [self._name_of_head(name, head) for head in range(heads)] or [name]
        encodings = tuple(self._encoding(encoded) for encoded in names)
        return View(self._round(x, encodings), heads, 0, encodings)

    def _as(self, x: str, like: View) -> View:
        return View(self._round(x, like.encodings), like.heads, like.head, like.encodings)

    def _round(self, x: str, encodings: Sequence[Encoding]) -> str:
        integers = self._nodes.quantize(x, encodings, f"{x}.integers")
        return self._nodes.dequantize(integers, encodings, f"{x}.rounded")

    def join(self, parts: list[View], name: str) -> View:
        encodings = tuple(self._encoding(self._name_of_head(name, head)) for head in range(parts[0].heads or 1))
        joins_heads = parts[0].heads and {part.tensor for part in parts} == {parts[0].tensor}
        if joins_heads or any(part.encodings != encodings for part in parts):
            return super().join(parts, name)
        key = ("Concat", *(part.tensor for part in parts))
        return replace(parts[0], tensor=self._once(key, lambda: self._nodes.add("Concat", key[1:], name, axis=-1)))

    def _product(self, x: View, keys: Sequence[str], name: str) -> str:
        (key,) = keys
        place = self._weights.places.matrices[key]
        if place.by_outputs:
            rows = self._nodes.reshape(x.tensor, [-1, place.rows])
            product = self._nodes.add("Gemm", [rows, self._matrix(key, 0)], f"{name}.product", transB=1)
            return self._nodes.reshape(product, [1, -1, place.columns])
        parts = [self._matrix(key, head) for head in range(place.heads)]
        whole = parts[0] if len(parts) == 1 else self._nodes.add("Concat", parts, f"{key}.floats", axis=1)
        return self._nodes.add("MatMul", [x.tensor, whole], f"{name}.product")

    def _matrix(self, key: str, head: int) -> str:
        """The floats of a head's matrix; the runtime computes them once, when it loads the graph."""
        nodes, place, kind = self._nodes, self._weights.places.matrices[key], WEIGHT_TYPES[self._dtype(key)]
        name, (integers, scales, *blocks) = f"{key}.h{head}", place.head_extents(head)
        element, columns = _ELEMENTS[kind.stored], [place.width]
        shape = [*columns, place.rows] if place.by_outputs else [place.rows, *columns]
        stored = nodes.external(f"{name}.{kind.stored}", element, shape, place.file, integers)
        steps = nodes.external(f"{name}.scale", TensorProto.FLOAT, columns, place.file, scales)
        if not blocks:
            return nodes.add("DequantizeLinear", [stored, steps], f"{name}.floats", axis=0 if place.by_outputs else 1)
        of_blocks_shape = [place.blocks, *columns]
        factors = nodes.external(f"{name}.block_scale", TensorProto.UINT8, of_blocks_shape, place.file, blocks[0])
        of_blocks = nodes.add("DequantizeLinear", [factors, steps], f"{name}.steps", axis=1)
        return nodes.add("DequantizeLinear", [stored, of_blocks], f"{name}.floats", axis=0, block_size=kind.block)

    def _operand(self, values: View) -> View:
        if values.encodings[0].dtype != "u16":
            return values
        encodings = tuple(signed_operand(encoding) for encoding in values.encodings)
        rounded = self._once(("signed", values.tensor), lambda: self._round(values.tensor, encodings))
        return replace(values, tensor=rounded, encodings=encodings)

    def _dtype(self, key: str) -> WeightDtype:
        return self._weights.places.matrices[key].dtype

    def _by_group(self, x: View, shared: View) -> tuple[str, int]:
        group_size = x.heads // shared.heads
        if group_size > 1 and folds_heads(self._source.graph, self.spec):
            rows = group_size * self._ar
            return self._nodes.reshape(x.tensor, [shared.heads, 1, rows, -1]), rows
        if group_size == 1 or shared.heads == 1:
            return x.tensor, self._ar
        return self._nodes.reshape(x.tensor, [shared.heads, group_size, self._ar, -1]), self._ar

    def _by_keys(self, query: View, keys: View) -> str:
        left, rows = self._by_group(query, keys)
        turned = self._once(("turned", keys.tensor), lambda: self._nodes.transpose(keys.tensor, 0, 1, 3, 2))
        columns = self._dequantized(replace(keys, tensor=turned))
        return self._apart(self._multiply(left, columns, rows), query.heads)
