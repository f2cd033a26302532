"""Matrices of packed integers: one reader for all formats, and where each of them keeps what.

GPTQ's layout is that of AutoGPTQ, GPTQModel and optimum, AWQ's that of AutoAWQ for its matrix product (`gemm`), and the
others those of compressed-tensors, as llm-compressor writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgekv.spec import by_inputs
from exporters.checkpoint.fold import EVERY, Floats, Rows
from exporters.checkpoint.quantized.matrix import (
    CarryCost,
    QuantizedMatrix,
    Storage,
    check_kind,
    check_shape,
    unreadable,
)
from exporters.checkpoint.stored import StoredTensor, row_chunks
from quant import WEIGHT_TYPES, Grid, QuantizedWeight, WeightDtype, rescale

Integers = NDArray[np.int16]

WORD_BITS = 32
_BLOCKS: tuple[WeightDtype, ...] = ("lpbq128", "lpbq64", "lpbq32")


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where a format keeps the parts of a matrix, and how.

    Scales are `[out, groups]`. Zero points are packed along the outputs.

    Attributes:
        integers: ending of the integers' name.
        scales: of the scales'.
        zeros: of the zero points'.
        groups: of the tensor with the group of each input.
        shape: of the tensor with the shape `[out, in]`; empty if it follows from the integers.
        packed: the axis along which an int32 holds several integers; None for a byte each.
        inputs_first: whether the parts are `[in, out]` and `[groups, out]`.
        order: the number of the element in each place of a word, lowest bits first; empty for 0, 1, 2, ...
        zeros_less: what is subtracted from stored zero points.
    """

    integers: str
    scales: str
    zeros: str = ""
    groups: str = ""
    shape: str = ""
    packed: Literal["in", "out"] | None = None
    inputs_first: bool = False
    order: tuple[int, ...] = ()
    zeros_less: int = 0

    @property
    def parts(self) -> tuple[str, ...]:
        """Endings of all parts."""
        return tuple(filter(None, (self.integers, self.scales, self.zeros, self.groups, self.shape)))

    def turned(self, outputs: int, others: int) -> tuple[int, int]:
        """The shape of a part with these outputs."""
        return (others, outputs) if self.inputs_first else (outputs, others)

    @property
    def marks(self) -> tuple[str, ...]:
        """Endings that only quantized matrices have, and all of them."""
        return (self.scales,) if self.integers == ".weight" else (self.integers, self.scales, self.zeros)


_GPTQ = PackedLayout(".qweight", ".scales", ".qzeros", ".g_idx", packed="in", inputs_first=True, zeros_less=1)
_PACKED = PackedLayout(
    ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape", packed="in"
)
_BYTES = PackedLayout(".weight", ".weight_scale", ".weight_zero_point", ".weight_g_idx")
LAYOUTS: Mapping[str, tuple[PackedLayout, ...]] = {
    "gptq": (_GPTQ,),
    "gptq_v2": (replace(_GPTQ, zeros_less=0),),
    "awq": (
        PackedLayout(".qweight", ".scales", ".qzeros", packed="out", inputs_first=True, order=(0, 2, 4, 6, 1, 3, 5, 7)),
    ),
    "compressed-tensors": (_PACKED, _BYTES),
    "fp8": (PackedLayout(".weight", ".weight_scale_inv"), PackedLayout(".weight", ".weight_scale")),
}
"""By format; of several, a matrix has the first whose integers and scales there are."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of a group of modules are quantized.

    Attributes:
        bits: of an integer, or of a float.
        group: inputs that share a scale; None for all.
        symmetric: whether all zero points are 0.
        floats: whether weights are float8.
        block: rows and columns that share a scale, if both are bounded.
    """

    bits: int
    group: int | None = None
    symmetric: bool = False
    floats: bool = False
    block: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """For reports."""
        if self.floats:
            return "float8" if self.block is None else f"float8 in blocks of {self.block[0]} x {self.block[1]}"
        return f"int{self.bits} per channel" if self.group is None else f"int{self.bits} in groups of {self.group}"

    def groups(self, inputs: int) -> int:
        """Scales of an output channel."""
        return 1 if self.group is None else -(-inputs // self.group)


@dataclass(frozen=True, slots=True, eq=False)
class IntegerMatrix(QuantizedMatrix):
    """A matrix `[out, in]` of integers: `(integer - zero point) * scale`, with one of both for each group of inputs.

    Attributes:
        file: where the integers are stored.
        shape: `[out, in]`.
        layout: of the parts.
        bits: of an integer: 4 or 8.
        values: the integers.
        scale: scales, or one for all.
        zeros: zero points; None if all are 0.
        order: the group of each input, unless groups are neighbours of equal size.
    """

    file: Path
    shape: tuple[int, ...]
    layout: PackedLayout
    bits: int
    values: StoredTensor
    scale: StoredTensor
    zeros: StoredTensor | None
    order: NDArray[np.int64] | None

    def integers(self, rows: Rows) -> Integers:
        """`[rows, in]`, from -8 to 7 or from -128 to 127."""
        stored, layout = self.values.open(), self.layout
        if layout.packed is None:
            return stored[rows].astype(np.int16)
        if layout.packed == "in":
            words = stored[:, rows].T if layout.inputs_first else stored[rows]
            return np.ascontiguousarray(self._centred(self._unpacked(words))[:, : self.shape[1]])
        chosen, in_word = np.arange(self.shape[0])[rows], WORD_BITS // self.bits
        first = int(chosen.min()) // in_word
        words = stored[:, first : int(chosen.max()) // in_word + 1]
        return np.ascontiguousarray(self._centred(self._unpacked(words)[:, chosen - first * in_word].T))

    def scales(self, rows: Rows) -> Floats:
        """`[rows, groups]`."""
        stored = self.scale.open()
        scales: Floats = self._of_rows(stored.T if self.layout.inputs_first else stored)[rows]
        return np.ascontiguousarray(scales, np.float32)

    def zero_points(self, rows: Rows) -> Integers | None:
        """`[rows, groups]`, in the range of the integers; None if all are 0."""
        if self.zeros is None:
            return None
        stored = self.zeros.open()
        if self.layout.packed is None or self.zeros.dtype != np.int32:
            return self._of_rows(stored.astype(np.int16))[rows]
        words = stored if self.layout.inputs_first else stored.T
        zeros = self._unpacked(words)[:, : self.shape[0]].T[rows].astype(np.int16) + np.int16(self.layout.zeros_less)
        zeros &= np.int16((1 << self.bits) - 1)
        return np.ascontiguousarray(self._centred(zeros))

    def read(self, rows: Rows) -> Floats:
        values = self.integers(rows).astype(np.float32)
        scales, zeros = self.scales(rows), self.zero_points(rows)
        if self.order is not None:
            values -= 0 if zeros is None else zeros[:, self.order]
            values *= scales[:, self.order]
            return values
        groups = values.reshape(*scales.shape, -1)
        groups -= 0 if zeros is None else zeros[..., None]
        groups *= scales[..., None]
        return values

    def storage(self) -> Storage:
        scales, zeros = self.scales(EVERY), self.zero_points(EVERY)
        inputs, groups = self.shape[1], scales.shape[1]
        group = inputs // groups
        dtype: WeightDtype = "int8"
        if self.bits == 4:
            blocks = (name for name in _BLOCKS if group % (WEIGHT_TYPES[name].block or 1) == 0)
            dtype = "int4" if groups == 1 else next(blocks, "int8")
        if zeros is not None and zeros.any():
            return Storage(dtype, "asymmetric")
        if self.order is not None:
            return Storage(dtype, "inputs of a group are not neighbours")
        if groups > 1 and WEIGHT_TYPES[dtype].block is None:
            return Storage(dtype, f"int{self.bits} in groups of {group}")
        return Storage(dtype, "" if (scales > 0).all() else "scales that are not above 0")

    def carried(self, rows: slice, gain: float) -> QuantizedWeight:
        """The stored integers of some rows, of a matrix whose `storage` has no obstacle.

        Scales of groups become LPBQ's; see `quant.rescale`.

        Args:
            rows: output channels.
            gain: multiplies the matrix.
        """
        dtype = self.storage().dtype
        integers = np.ascontiguousarray(by_inputs(self.integers(rows)), np.int8)
        steps = np.ascontiguousarray(by_inputs(self.scales(rows))) * np.float32(gain)
        if WEIGHT_TYPES[dtype].block is None:
            return QuantizedWeight(integers, Grid(dtype, steps[0]))
        return rescale(integers, steps, dtype)

    def cost(self, first: int, stop: int) -> CarryCost:
        """What `carried` changes in the rows from `first` to `stop`."""
        if WEIGHT_TYPES[self.storage().dtype].block is None:
            return CarryCost(0, 0.0, 0.0)
        changed, error, energy = 0, 0.0, 0.0
        for chunk in row_chunks((stop - first, self.shape[1])):
            rows = slice(first + chunk.start, min(first + chunk.stop, stop))
            weight, exact = self.carried(rows, 1.0), by_inputs(self.read(rows))
            changed += int(np.count_nonzero(weight.integers != by_inputs(self.integers(rows))))
            error += float(np.square(weight.dequantize() - exact).sum(dtype=np.float64))
            energy += float(np.square(exact).sum(dtype=np.float64))
        return CarryCost(changed, error, energy)

    def _centred(self, unsigned: NDArray[Any]) -> Integers:
        values: Integers = unsigned.astype(np.int16)
        values -= np.int16(1 << (self.bits - 1))
        return values

    def _unpacked(self, words: NDArray[Any]) -> NDArray[np.uint8]:
        """Unsigned integers from the last axis of int32: `[..., words * 32 / bits]`."""
        integers = np.ascontiguousarray(words, "<i4").view(np.uint8)
        if self.bits == 4:
            pairs = np.stack((integers & np.uint8(15), integers >> np.uint8(4)), axis=-1)
            integers = pairs.reshape(*integers.shape[:-1], -1)
        if self.layout.order:
            places = np.argsort(self.layout.order)
            integers = integers.reshape(*words.shape, -1)[..., places].reshape(integers.shape)
        return integers

    def _of_rows(self, values: NDArray[Any]) -> NDArray[Any]:
        """`[out, groups]`; one value stands for all."""
        if values.ndim == 2 and len(values) == self.shape[0]:
            return values
        return np.broadcast_to(values.reshape(-1, 1), (self.shape[0], 1))


def integer_matrix(
    module: str, tensors: Mapping[str, StoredTensor], layout: PackedLayout, scheme: Scheme
) -> IntegerMatrix:
    """The matrix of a module.

    Raises:
        CheckpointError: a part is missing, or of another shape or type than the others say.
    """
    bits, group = scheme.bits, scheme.group
    outputs, inputs = matrix_shape(module, tensors, layout, bits)
    values, scale = tensors[module + layout.integers], tensors.get(module + layout.scales)
    groups = scheme.groups(inputs)
    may_be_single = groups == 1 and not layout.inputs_first
    if scale is None or not may_be_single or scale.shape not in ((), (1,), (1, 1), (outputs,)):
        scale = check_shape(module + layout.scales, scale, layout.turned(outputs, groups))
    check_kind(module + layout.scales, scale)
    zeros = tensors.get(module + layout.zeros)
    if zeros is not None or not scheme.symmetric:
        words = layout.packed is not None and (layout.inputs_first or zeros is None or zeros.dtype == np.int32)
        shape = layout.turned(-(-outputs * bits // WORD_BITS), groups) if words else scale.shape
        check_shape(module + layout.zeros, zeros, shape, "words" if words else "integers")
    order = np.arange(inputs) // (group or inputs)
    neighbours = groups == 1 or inputs % (group or inputs) == 0
    if layout.groups and (stored := tensors.get(module + layout.groups)) is not None:
        own_order = _groups(module + layout.groups, stored, inputs, groups)
        neighbours &= bool(np.array_equal(own_order, order))
        order = own_order
    kept = None if neighbours else order
    return IntegerMatrix(values.file, (outputs, inputs), layout, bits, values, scale, zeros, kept)


def matrix_shape(module: str, tensors: Mapping[str, StoredTensor], layout: PackedLayout, bits: int) -> tuple[int, int]:
    """`[out, in]`.

    Raises:
        CheckpointError: the integers or the shape are missing, or of another type.
    """
    key = module + layout.integers
    values = tensors.get(key)
    what = "a matrix of integers or floats of 8 bits" if layout.packed is None else "a matrix of int32"
    if values is None or len(values.shape) != 2 or 0 in values.shape:
        raise unreadable(key, what, values)
    if values.dtype.itemsize != 1 if layout.packed is None else values.dtype != np.int32:
        raise unreadable(key, what, values)
    if layout.shape:
        stored = check_shape(module + layout.shape, tensors.get(module + layout.shape), (2,), "integers")
        if stored.open().min() < 1:
            raise unreadable(module + layout.shape, "two whole numbers above 0", stored)
        outputs, inputs = (int(size) for size in stored.open())
        return outputs, inputs
    inputs, outputs = values.shape if layout.inputs_first else values.shape[::-1]
    in_word = WORD_BITS // bits
    return outputs * (in_word if layout.packed == "out" else 1), inputs * (in_word if layout.packed == "in" else 1)


def _groups(key: str, stored: StoredTensor, inputs: int, groups: int) -> NDArray[np.int64]:
    """The group of each input.

    Raises:
        CheckpointError: they are not one integer for each input, from 0 to the last group.
    """
    group_of = check_shape(key, stored, (inputs,), "integers").open().astype(np.int64)
    if group_of.min() < 0 or group_of.max() >= groups:
        raise unreadable(
            key, f"groups from 0 to {groups - 1}", None, f"groups from {group_of.min()} to {group_of.max()}"
        )
    return group_of
