"""Products of float activations with a bundle's integer matrices, without a float copy of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from edgekv.graphs.cpu_mode import RenderedMode
from edgekv.graphs.nodes import Nodes
from edgekv.graphs.processor import multiplies_integers
from edgekv.graphs.weight_file import WeightFile
from quant import Grid, QuantizedWeight, WeightType

_MIN_ROWS = 4  # with fewer, reading 4-bit weights is faster
_LARGE = 1 << 23  # weights: their product takes as long with two rows as with one
_BITS = 8
_MIDDLE = 128  # zero point of uint8
_MIN_BLOCK = 16  # of QMoE
_MIN_BLOCK_ROWS, _BLOCK_ROWS, _BYTE_BLOCK_ROWS = 32, 64, 128
"""Of matrices with one scale a column; activations get a scale for each block. Bytes are faster in larger ones, which
only results of norms fill evenly."""
_INT8_ACTIVATIONS = 4
_GROUP_INPUTS = 768  # of activations that share a range, where they are no results of norms
_MAX_GROUPS = 4  # each has a product of its own
_GROUP_MULTIPLE = 32
_STEPS = (1 / 127, 1 / 127 / 254)  # of the largest element: the rest is at most half a step, 127 smaller ones
_MIN_STEP = 1e-30  # of a row of zeros

_Part = tuple[str, str, str]  # integers, their scale and zero point


@dataclass(frozen=True, slots=True)
class Rows:
    """Activations that matrices multiply.

    Attributes:
        name: of the tensor `[1, rows, K]`.
        axis: name of the axis of its rows: tensors with the same one have as many.
        count: its rows, or the most that it can have.
        is_normal: whether it is the result of a norm: others have outliers that leave few bits to the rest.
        only_bytes: whether all matrices that multiply it have 8 bits.
    """

    name: str
    axis: str
    count: int
    is_normal: bool
    only_bytes: bool


class ExpertMatrices(NamedTuple):
    """The matrices of an expert."""

    gate: QuantizedWeight
    up: QuantizedWeight
    down: QuantizedWeight


def beside(matrices: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Matrices of one type that read the same activations, as one."""
    if len(matrices) == 1:
        return matrices[0]
    integers = np.concatenate([matrix.integers for matrix in matrices], axis=1)
    return QuantizedWeight(integers, Grid.joined([matrix.grid for matrix in matrices]))


def packed(weight: QuantizedWeight, block: int) -> NDArray[np.uint8]:
    """The integers in blocks of rows, as `MatMulNBits` reads them: `[out, blocks, bytes of a block]`.

    The zero point is 8 or 128. Of 4 bits, the low ones come first.
    """
    rows, columns = weight.integers.shape
    bits = weight.grid.type.bits
    zero, blocks = 1 << (bits - 1), -(-rows // block)
    unsigned: NDArray[np.uint8] = np.full((columns, blocks * block), zero, np.uint8)
    unsigned[:, :rows] = (weight.integers.T.astype(np.int16) + zero).astype(np.uint8)
    if bits == 4:
        unsigned = (unsigned[:, 0::2] | unsigned[:, 1::2] << 4).astype(np.uint8)
    return unsigned.reshape(columns, blocks, -1)


def scales(weight: QuantizedWeight, block: int, row_gains: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """The scale of each block of rows, `[out, blocks]`, times the gain of its rows."""
    steps = weight.grid.scales[:, None]
    if weight.grid.block_scales is None:
        by_block = np.repeat(steps, -(-len(weight.integers) // block), axis=1)
    else:
        by_block = weight.grid.block_scales.T * steps
    return by_block if row_gains is None else by_block * row_gains[::block]


def wide(weight: QuantizedWeight) -> NDArray[np.int8] | None:
    """The integers times the scales of their blocks, `[in, out]`; None if they do not fit into 8 bits."""
    if weight.grid.block_scales is None:
        return weight.integers
    blocks = weight.integers.reshape(len(weight.grid.block_scales), -1, weight.integers.shape[1])
    products = blocks * weight.grid.block_scales[:, None].astype(np.int16)
    if products.min() < -128 or products.max() > 127:
        return None
    return products.astype(np.int8).reshape(weight.integers.shape)


def _shared_block(expert: ExpertMatrices) -> int | None:
    """Length of blocks of all matrices of an expert, as `QMoE` takes it; None if they have none in common."""
    if own := expert.down.grid.type.block:
        return own if own >= _MIN_BLOCK and own & (own - 1) == 0 else None
    common = math.gcd(_BLOCK_ROWS, *(len(matrix.integers) for matrix in expert))
    return common if common >= _MIN_BLOCK else None


def _bytes(weight: QuantizedWeight) -> NDArray[np.uint8]:
    """The integers as `QMoE` reads them, `[out, bytes]`: as `packed` does, without rows that fill a block."""
    zero = 1 << (weight.grid.type.bits - 1)
    unsigned: NDArray[np.uint8] = (weight.integers.T.astype(np.int16) + zero).astype(np.uint8)
    return unsigned if zero > 8 else (unsigned[:, 0::2] | unsigned[:, 1::2] << 4).astype(np.uint8)


def _in_turn(gate: QuantizedWeight, up: QuantizedWeight, block: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Integers and scales of two matrices, an output channel of each in turn."""

    def merged(first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
        together: NDArray[Any] = np.stack([first, second], axis=1).reshape(2 * len(first), -1)
        return together

    return merged(_bytes(gate), _bytes(up)), merged(scales(gate, block), scales(up, block))


class Products:
    """Writes products of float rows with integer matrices.

    Products of at least four rows are products of 8-bit integers. Weights are the bundle's integers times the scales of
    their blocks: exactly 8 bits. In `fast` activations are rounded to 8 bits: results of norms over the range of a row;
    others, whose outliers leave few bits to the rest, in groups of inputs, each with a product of its own. In encoders
    and in `exact16` they are rounded over the range of the tensor, and what that left to 8 more bits, in a product of
    its own.

    Of fewer rows, and of all rows in graphs that score texts, only 8-bit matrices are multiplied so: large ones, and
    those whose activations only 8-bit matrices read. There each row has a range of its own. Both parts are rows of one
    product, which reads the weights once. In `fast`, small matrices multiply only results of norms so, in one part.

    All others are products of `MatMulNBits`, which rounds activations to int8 in blocks as long as those of the
    weights: of one row in `fast`, and of two in `exact16`, the activation rounded to int8 and what that left. Prefill
    and decode graphs share the weights that they multiply alike.
    """

    def __init__(
        self,
        nodes: Nodes,
        weights: WeightFile,
        mode: RenderedMode,
        *,
        is_scoring: bool,
        batch_invariant: bool,
        in_groups: bool,
    ) -> None:
        """Prepare to multiply.

        Args:
            nodes: takes the nodes.
            weights: takes the integers and their scales.
            is_scoring: whether to multiply all rows as few ones.
            batch_invariant: whether the bits of a row must not depend on how many others there are: the kernel of 4-bit
                weights takes rows in pairs, and a single one differently, so that an odd row is multiplied twice.
            in_groups: whether `fast` rounds activations with outliers in groups of inputs, not in two parts.
        """
        self._nodes = nodes
        self._weights = weights
        self._mode = mode
        self._is_scoring = is_scoring
        self._batch_invariant = batch_invariant
        self._in_groups = in_groups
        self.made: dict[tuple[object, ...], Any] = {}

    def takes_any(self, count: int) -> bool:
        """Whether a graph of this number of rows has products that take fewer rows too."""
        return not (self._batch_invariant or self._is_scoring or count < _MIN_ROWS)

    def mixes(self, rows: int) -> bool:
        """Whether one node may compute a layer's experts: for a single row in `fast`."""
        return self._mode == "fast" and rows == 1 and not (self._batch_invariant or self._is_scoring)

    def mix(
        self, x: str, routing: tuple[str, str], used: int, experts: Sequence[ExpertMatrices], key: str
    ) -> str | None:
        """The weighted sum of a layer's experts, `[1, 1, H]`; None if their types or sizes are none of `QMoE`'s.

        `QMoE` reads the integers of the experts that it chooses alone, and rounds activations to int8 in blocks.

        Args:
            x: `[1, 1, H]`.
            routing: names of 1 for each chosen expert, otherwise 0, and of the experts' weights, `[1, 1, E]`.
            used: experts of a token.
            experts: gate, up and down of each.
            key: begins the names of the matrices.
        """
        block, types = _shared_block(experts[0]), {matrix.grid.type for expert in experts for matrix in expert}
        if block is None or len(types) > 1 or not multiplies_integers():
            return None
        bits = types.pop().bits
        read = [_in_turn(expert.gate, expert.up, block) for expert in experts]
        written = [(_bytes(expert.down), scales(expert.down, block)) for expert in experts]
        constants = [
            self._stored(f"{key}.{name}", np.stack([arrays[place] for arrays in matrices]))
            for matrices, names in ((read, ("gate_up", "gate_up_scales")), (written, ("down", "down_scales")))
            for place, name in enumerate(names)
        ]
        chosen, weights = (self._nodes.reshape(name, [-1, len(experts)]) for name in routing)
        inputs = [x, chosen, *constants[:2], "", *constants[2:], *[""] * 7, weights]
        routes = {"k": used, "normalize_routing_weights": 0, "expert_weight_bits": bits, "block_size": block}
        swiglu = {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.0, "activation_beta": 0.0}
        return self._nodes.add("QMoE", inputs, f"{key}.mixed", accuracy_level=_INT8_ACTIVATIONS, **routes, **swiglu)

    def block_rows(self, x: Rows, kind: WeightType, row_gains: NDArray[np.float32] | None = None) -> int | None:
        """The rows of a block in products of few rows.

        Args:
            x: the rows that it multiplies.
            kind: of the matrix.
            row_gains: what its rows are multiplied by, `[in]`. A block has one scale.

        Returns:
            None if the rows of a block have several gains.
        """
        # The kernel of the larger ones does not compute each row as if it were alone.
        is_larger = kind.bits == _BITS and x.is_normal and not self._batch_invariant
        sizes = [kind.block] if kind.block else [_BYTE_BLOCK_ROWS if is_larger else _BLOCK_ROWS, _MIN_BLOCK_ROWS]
        if row_gains is None:
            return sizes[0]
        starts = (np.arange(0, len(row_gains), block) for block in sizes)
        ranges = (np.maximum.reduceat(row_gains, at) - np.minimum.reduceat(row_gains, at) for at in starts)
        return next((block for block, spread in zip(sizes, ranges, strict=True) if not spread.any()), None)

    def in_blocks(self, x: Rows, size: int, bits: int) -> bool:
        """Whether few rows are multiplied by a matrix of this size in its blocks, whose scales can have further gains.

        Args:
            x: the rows.
            size: elements of the matrix.
            bits: of an element.
        """
        is_shared = x.only_bytes and (x.is_normal or self._mode != "fast")
        return not multiplies_integers() or not (bits == _BITS and (size >= _LARGE or is_shared))

    def multiply(self, x: Rows, weight: QuantizedWeight, key: str, row_gains: NDArray[np.float32] | None = None) -> str:
        """The product `[1, rows, out]`.

        Args:
            x: the rows.
            weight: the matrix.
            key: its name.
            row_gains: what its rows are multiplied by besides, `[in]`, if the product is one `in_blocks`.
        """
        by_row = self._is_scoring or x.count < _MIN_ROWS
        if not multiplies_integers() or (by_row and self.in_blocks(x, weight.integers.size, weight.grid.type.bits)):
            return self._multiply_blocks(x, weight, key, row_gains)
        assert row_gains is None, "blocks have gains"
        integers = wide(weight)
        if integers is None:
            return self._multiply_blocks(x, weight, key)
        if not by_row and self._mode == "fast" and (x.is_normal or self._in_groups):
            return self._multiply_groups(x, key, integers, weight.grid.scales)
        constants = self._stored(f"{key}.wide", integers), self._stored(f"{key}.steps", weight.grid.scales)
        if by_row:
            parts = 1 if self._mode == "fast" and weight.integers.size < _LARGE else 2
            return self._multiply_rows(x, key, parts, constants, integers)
        products = [
            self._nodes.add("MatMulIntegerToFloat", [part, constants[0], scale, constants[1], zero], f"{key}.product")
            for part, scale, zero in self._once(x, "parts", lambda: _round(self._nodes, x.name))
        ]
        return self._nodes.add("Add", products, f"{key}.sum")

    def _stored(self, name: str, array: NDArray[Any]) -> str:
        element = helper.np_dtype_to_tensor_dtype(array.dtype)
        return self._nodes.external(name, element, array.shape, self._weights.location, self._weights.write(array))

    def _once(self, x: Rows, what: object, make: Any) -> Any:
        """What was made of a tensor before, or is made now."""
        if (x.name, what) not in self.made:
            self.made[x.name, what] = make()
        return self.made[x.name, what]

    def _multiply_groups(self, x: Rows, key: str, integers: NDArray[np.int8], scales: NDArray[np.float32]) -> str:
        """The product of many rows, rounded to 8 bits: a result of a norm over the range of the row, others by groups.

        These have outliers, which leave few bits to the rest of their group alone.
        """
        nodes, (inputs, _) = self._nodes, integers.shape
        groups = 1 if x.is_normal else _groups(inputs)
        parts = self._once(x, groups, lambda: self._round_groups(x, inputs, groups))
        steps, one, middle = self._stored(f"{key}.steps", scales), nodes.number(1), nodes.number(_MIDDLE, np.uint8)
        total = ""
        for at, ((rows, row_steps), weights) in enumerate(zip(parts, np.split(integers, groups), strict=True)):
            name = f"{key}.wide" if groups == 1 else f"{key}.wide.{at}"
            operands = [rows, self._stored(name, weights), one, steps, middle]
            product = nodes.add("MatMulIntegerToFloat", operands, f"{key}.product")
            scaled = nodes.add("Mul", [product, row_steps], f"{key}.scaled")
            total = nodes.add("Add", [total, scaled], f"{key}.sum") if total else scaled
        return total

    def _round_groups(self, x: Rows, inputs: int, groups: int) -> list[tuple[str, str]]:
        """For each group of inputs the rows `[1, AR, K / groups]` of uint8 around 128, and steps `[AR, 1]`."""
        nodes, name = self._nodes, x.name
        by_group = name if groups == 1 else nodes.reshape(name, [1, -1, inputs // groups])
        magnitude = nodes.add("Abs", [by_group], f"{name}.abs")
        largest = nodes.add("ReduceMax", [magnitude, nodes.integers([0, 2])], f"{name}.largest", keepdims=0)
        scaled = nodes.add("Mul", [largest, nodes.number(_STEPS[0])], f"{name}.scaled")
        steps = nodes.add("Max", [scaled, nodes.number(_MIN_STEP)], f"{name}.steps")
        rows = nodes.add("QuantizeLinear", [by_group, steps, self._middles(x, steps, groups)], f"{name}.rows", axis=1)
        row_steps = nodes.reshape(steps, [-1, groups])
        if groups == 1:
            return [(rows, row_steps)]
        sizes = [inputs // groups] * groups
        parts = nodes.split(nodes.reshape(rows, [1, -1, inputs]), sizes, -1)
        return [*zip(parts, nodes.split(row_steps, [1] * groups, -1), strict=True)]

    def _middles(self, x: Rows, steps: str, groups: int) -> str:
        """The zero point for each of the steps `[AR * groups]`, one tensor for all rows of an axis."""
        nodes, key = self._nodes, ("middles", x.axis, groups)
        if key not in self.made:
            count = nodes.add("Shape", [steps], f"{steps}.count")
            self.made[key] = nodes.add("Expand", [nodes.number(_MIDDLE, np.uint8), count], f"{steps}.middles")
        middles: str = self.made[key]
        return middles

    # ------------------------------------------------------------------ blocks

    def _multiply_blocks(
        self, x: Rows, weight: QuantizedWeight, key: str, row_gains: NDArray[np.float32] | None = None
    ) -> str:
        """By integers of 4 or 8 bits, in blocks."""
        nodes, (inputs, outputs) = self._nodes, weight.integers.shape
        bits, block = weight.grid.type.bits, self.block_rows(x, weight.grid.type, row_gains)
        assert block is not None, "a block has one gain"
        constants = [
            self._stored(f"{key}.packed", packed(weight, block)),
            self._stored(f"{key}.scales", scales(weight, block, row_gains).reshape(-1)),
        ]

        def product(rows: str) -> str:
            sizes = {"K": inputs, "N": outputs, "bits": bits, "block_size": block}
            return nodes.add(
                "MatMulNBits", [rows, *constants], f"{key}.product", accuracy_level=_INT8_ACTIVATIONS, **sizes
            )

        if self._mode == "exact16":
            rows = self._once(x, block, lambda: _in_two_rows(nodes, x, inputs, block))
            both = product(rows)
            if x.count > 1:
                both = nodes.reshape(both, [1, 2, -1, outputs])
            return nodes.add("ReduceSum", [both, nodes.integers([1])], f"{key}.sum", keepdims=int(x.count == 1))
        if not self._batch_invariant or bits == _BITS or x.count % 2 == 0:
            return product(x.name)
        even = self._once(x, "even", lambda: _with_last_twice(nodes, x))
        return nodes.split(product(even), [x.count, 1], 1)[0]

    # ------------------------------------------------------------------ rows

    def _multiply_rows(
        self, x: Rows, key: str, parts: int, constants: tuple[str, str], integers: NDArray[np.int8]
    ) -> str:
        """The product of rows that have their own scales, in one part or in two, which are added."""
        nodes, (weights, steps), outputs = self._nodes, constants, integers.shape[1]
        if x.count == parts == 1:
            return nodes.add("DynamicQuantizeMatMul", [x.name, weights, steps], f"{key}.product")
        if parts == 1:
            rows, row_steps, zeros = self._once(x, "rows", lambda: _round_each_row(nodes, x))
            sums = nodes.constant(integers.sum(axis=0, dtype=np.int32), f"{key}.sums")
            product = nodes.add("MatMulInteger", [rows, weights], f"{key}.integers")
            surplus = nodes.add("Mul", [zeros, sums], f"{key}.surplus")
            exact = nodes.add("Sub", [product, surplus], f"{key}.exact")
            both = nodes.add("Mul", [row_steps, steps], f"{key}.both_steps")
            return nodes.add("Mul", [_as_float(nodes, exact), both], f"{key}.product")
        rows, row_scales = self._once(x, "two rows", lambda: _round_in_two_parts(nodes, x))
        middle, one = nodes.number(_MIDDLE, np.uint8), nodes.number(1)
        product = nodes.add("MatMulIntegerToFloat", [rows, weights, one, steps, middle], f"{key}.parts")
        if x.count == 1:
            return nodes.add("MatMul", [row_scales, product], f"{key}.product")
        # One product for each row: they add as that of a single row does.
        by_row = nodes.reshape(product, [1, x.count, parts, outputs])
        added = nodes.add("MatMul", [row_scales, by_row], f"{key}.product")
        return nodes.reshape(added, [1, x.count, outputs])


def _round(nodes: Nodes, x: str) -> list[_Part]:
    """A tensor in two parts of 8 bits, each with its scale and zero point."""
    integers, scale, zero = (nodes.unique(f"{x}.{output}") for output in ("integers", "scale", "zero"))
    nodes.write("DynamicQuantizeLinear", [x], [integers, scale, zero])
    held = nodes.add("DequantizeLinear", [integers, scale, zero], f"{x}.held")
    rest = nodes.add("Sub", [x, held], f"{x}.rest")
    # The rest is at most half a step: 127 smaller ones.
    smaller = nodes.add("Mul", [scale, nodes.number(1 / 254)], f"{x}.smaller")
    middle = nodes.number(_MIDDLE, np.uint8)
    rounded = nodes.add("QuantizeLinear", [rest, smaller, middle], f"{x}.rounded")
    return [(integers, scale, zero), (rounded, smaller, middle)]


def _groups(inputs: int) -> int:
    """Into how many groups of adjacent inputs activations are divided."""
    counts = range(min(_MAX_GROUPS, -(-inputs // _GROUP_INPUTS)), 0, -1)
    return next(count for count in counts if inputs % (count * _GROUP_MULTIPLE) == 0 or count == 1)


def _round_each_row(nodes: Nodes, x: Rows) -> _Part:
    """Rows `[1, AR, K]` of uint8, and their steps and zero points `[AR, 1]`, float and int32.

    The range of a row is that of its elements and 0, as `DynamicQuantizeLinear` takes it for a tensor.
    """
    along, zero, max_level, min_step = nodes.integers([-1]), *(nodes.number(value) for value in (0, 255, _MIN_STEP))
    low = nodes.add("Min", [nodes.add("ReduceMin", [x.name, along], f"{x.name}.min"), zero], f"{x.name}.low")
    high = nodes.add("Max", [nodes.add("ReduceMax", [x.name, along], f"{x.name}.max"), zero], f"{x.name}.high")
    span = nodes.add("Sub", [high, low], f"{x.name}.span")
    steps = nodes.add("Max", [nodes.add("Div", [span, max_level], f"{x.name}.step"), min_step], f"{x.name}.steps")
    below = nodes.add("Neg", [nodes.add("Div", [low, steps], f"{x.name}.first")], f"{x.name}.below")
    zeros = nodes.add("Round", [nodes.add("Clip", [below, zero, max_level], f"{x.name}.clipped")], f"{x.name}.zeros")
    flat = nodes.reshape(zeros, [x.count])
    rounded = nodes.add("Cast", [flat], f"{x.name}.zero_bytes", to=helper.np_dtype_to_tensor_dtype(np.dtype(np.uint8)))
    rows = nodes.add("QuantizeLinear", [x.name, nodes.reshape(steps, [x.count]), rounded], f"{x.name}.rows", axis=1)
    columns = [nodes.reshape(column, [x.count, 1]) for column in (steps, zeros)]
    int32 = helper.np_dtype_to_tensor_dtype(np.dtype(np.int32))
    return rows, columns[0], nodes.add("Cast", [columns[1]], f"{x.name}.zero_integers", to=int32)


def _round_in_two_parts(nodes: Nodes, x: Rows) -> tuple[str, str]:
    """Rows of 8 bits, each in two parts `[1, 2 AR, K]`, and their scales `[1, AR, 1, 2]`.

    The scales of a single row are `[1, 1, 2]`.
    """
    is_single = x.count == 1
    middle = nodes.number(_MIDDLE, np.uint8)
    if not is_single:
        middle = nodes.constant(np.full(x.count, _MIDDLE, np.uint8), f"uint8_{_MIDDLE}_times_{x.count}")
    along = {} if is_single else {"axis": 1}
    magnitude = nodes.add("Abs", [x.name], f"{x.name}.abs")
    axes = nodes.integers([0, 1, 2] if is_single else [0, 2])
    largest = nodes.add("ReduceMax", [magnitude, axes], f"{x.name}.largest", keepdims=0)
    steps = [nodes.add("Mul", [largest, nodes.number(step)], f"{x.name}.step") for step in _STEPS]
    whole = nodes.add("QuantizeLinear", [x.name, steps[0], middle], f"{x.name}.whole", **along)
    held = nodes.add("DequantizeLinear", [whole, steps[0], middle], f"{x.name}.held", **along)
    rest = nodes.add("Sub", [x.name, held], f"{x.name}.rest")
    small = nodes.add("QuantizeLinear", [rest, steps[1], middle], f"{x.name}.small", **along)
    both = np.array(_STEPS, np.float32)
    if is_single:
        rows = nodes.add("Concat", [whole, small], f"{x.name}.two_rows", axis=1)
        return rows, nodes.add("Mul", [nodes.constant(both.reshape(1, 1, 2)), largest], f"{x.name}.scales")
    wide_rows = nodes.add("Concat", [whole, small], f"{x.name}.two_rows", axis=2)
    by_row = nodes.reshape(largest, [x.count, 1, 1])
    scales = nodes.add("Mul", [nodes.constant(both.reshape(1, 1, 1, 2)), by_row], f"{x.name}.scales")
    return nodes.reshape(wide_rows, [1, 2 * x.count, -1]), scales


def _in_two_rows(nodes: Nodes, x: Rows, width: int, block: int) -> str:
    """`[1, AR, K]` to `[1, 2 AR, K]`: what int8 holds of each block, then the rest.

    `MatMulNBits` rounds every row again, in the same blocks: the first row exactly, the second to the next 8 bits.
    """
    magnitude = nodes.add("Abs", [x.name], f"{x.name}.abs")
    kernel = {"kernel_shape": [block], "strides": [block], "ceil_mode": 1}
    largest = nodes.add("MaxPool", [magnitude], f"{x.name}.largest", **kernel)
    step = nodes.add("Mul", [largest, nodes.number(1 / 127)], f"{x.name}.step")
    int8 = helper.np_dtype_to_tensor_dtype(np.dtype(np.int8))
    blocks = {"axis": 2, "block_size": block}
    integers = nodes.add("QuantizeLinear", [x.name, step], f"{x.name}.whole", output_dtype=int8, **blocks)
    held = nodes.add("DequantizeLinear", [integers, step], f"{x.name}.held", **blocks)
    rest = nodes.add("Sub", [x.name, held], f"{x.name}.rest")
    return nodes.add("Concat", [held, rest], f"{x.name}.two_rows", axis=1)


def _with_last_twice(nodes: Nodes, x: Rows) -> str:
    last = x.name if x.count == 1 else nodes.split(x.name, [x.count - 1, 1], 1)[1]
    return nodes.add("Concat", [x.name, last], f"{x.name}.even", axis=1)


def _as_float(nodes: Nodes, x: str) -> str:
    return nodes.add("Cast", [x], f"{x}.float", to=helper.np_dtype_to_tensor_dtype(np.dtype(np.float32)))
