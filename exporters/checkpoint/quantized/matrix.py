"""Quantized matrices of a checkpoint, dequantized when they are read."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import CheckpointError
from edgekv.spec import Config, by_inputs
from exporters.checkpoint.stored import ComputedTensor, StoredTensor, row_chunks
from quant import WEIGHT_TYPES, Grid, QuantizedWeight, WeightDtype, rescale

Rows = slice | NDArray[np.int64]
Floats = NDArray[np.float32]
Integers = NDArray[np.int16]

PartKind = Literal["floats", "words", "integers"]

_FLOATS = ("float16", "bfloat16", "float32")
_BLOCKS: tuple[WeightDtype, ...] = ("lpbq128", "lpbq64", "lpbq32")
_FLOAT8 = np.arange(256, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Storage:
    """What a bundle can make of a quantized matrix without another type.

    Attributes:
        dtype: the integer type that is closest to what is stored.
        obstacle: why the integers cannot be carried over into it; empty if they can.
    """

    dtype: WeightDtype
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class CarryCost:
    """What carrying integers over into LPBQ changes.

    Attributes:
        changed: number of integers that differ.
        error: sum of squared differences of the weights; 0 if nothing changed.
        energy: sum of the squared weights; 0 for a type without blocks, which changes nothing.
    """

    changed: int
    error: float
    energy: float


class QuantizedMatrix(ComputedTensor):
    """A matrix that is stored with fewer bits than a float."""

    __slots__ = ()

    @abstractmethod
    def storage(self) -> Storage:
        """What a bundle can make of it."""


class IntegerMatrix(QuantizedMatrix):
    """A matrix `[out, in]` of integers: `(integer - zero point) * scale`, with one of both for each group of inputs.

    Integers and zero points are centred: those of a symmetric matrix of 4 bits are -8 to 7, and all zero points 0.

    Attributes:
        bits: of an integer: 4 or 8.
    """

    __slots__ = ()

    bits: int

    @abstractmethod
    def integers(self, rows: Rows) -> Integers:
        """`[rows, in]`, centred."""

    @abstractmethod
    def scales(self, rows: Rows) -> Floats:
        """`[rows, groups]`."""

    @abstractmethod
    def zero_points(self, rows: Rows) -> Integers | None:
        """`[rows, groups]`, centred; None if all are 0."""

    @abstractmethod
    def group_of(self) -> NDArray[np.int64] | None:
        """The group of each input; None if all groups have as many inputs and follow each other."""

    def read(self, rows: Rows) -> Floats:
        values = self.integers(rows).astype(np.float32)
        scales, zeros, group_of = self.scales(rows), self.zero_points(rows), self.group_of()
        if group_of is not None:
            values -= 0 if zeros is None else zeros[:, group_of]
            values *= scales[:, group_of]
            return values
        groups = values.reshape(*scales.shape, -1)
        groups -= 0 if zeros is None else zeros[..., None]
        groups *= scales[..., None]
        return values

    def storage(self) -> Storage:
        every = slice(None)
        scales, zeros = self.scales(every), self.zero_points(every)
        inputs, groups = self.shape[1], scales.shape[1]
        group = inputs // groups
        dtype: WeightDtype = "int8"
        if self.bits == 4:
            blocks = (each for each in _BLOCKS if group % (WEIGHT_TYPES[each].block or 1) == 0)
            dtype = "int4" if groups == 1 else next(blocks, "int8")
        if zeros is not None and zeros.any():
            return Storage(dtype, "asymmetric")
        if self.group_of() is not None:
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


@dataclass(frozen=True, slots=True)
class Float8Matrix(QuantizedMatrix):
    """A matrix `[out, in]` of float8 (e4m3) times a scale for each block.

    Attributes:
        file: where it is stored.
        shape: `[out, in]`.
        values: the stored matrix.
        scale: 0 or 1 elements, one for each row, or `[out / block rows, in / block columns]`, rounded up.
        block: rows and columns of a block, if there are blocks of columns.
    """

    file: Path
    shape: tuple[int, ...]
    values: StoredTensor
    scale: StoredTensor
    block: tuple[int, int] | None

    def read(self, rows: Rows) -> Floats:
        stored = self.values.open()[rows]
        table = _FLOAT8.view(stored.dtype).astype(np.float32)
        values: Floats = table[stored.view(np.uint8)]
        scales = self.scale.read(slice(None)) if self.scale.shape else self.scale.open().astype(np.float32)
        if self.block is None:
            values *= scales.reshape(-1, 1)[rows] if scales.size > 1 else scales.reshape(1, 1)
            return values
        height, width = self.block
        places = np.arange(self.shape[0])[rows] // height
        values *= np.repeat(scales, width, axis=1)[places, : self.shape[1]]
        return values

    def storage(self) -> Storage:
        return Storage("int8", "float8")


def unpack(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Unsigned integers of 4 or 8 bits from the last axis of int32, lowest bits first: `[..., words * 32 / bits]`."""
    found = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return found
    pairs = np.stack((found & np.uint8(15), found >> np.uint8(4)), axis=-1)
    nibbles: NDArray[np.uint8] = pairs.reshape(*found.shape[:-1], -1)
    return nibbles


def centred(unsigned: NDArray[np.uint8], bits: int) -> Integers:
    """Integers from -8 to 7, or from -128 to 127."""
    values: Integers = unsigned.astype(np.int16)
    values -= np.int16(1 << (bits - 1))
    return values


def check_shape(
    key: str, tensor: StoredTensor | None, shape: tuple[int, ...], kind: PartKind = "floats"
) -> StoredTensor:
    """The part of a quantized matrix.

    Raises:
        CheckpointError: it is missing, or has another shape or type.
    """
    if tensor is None or tensor.shape != shape:
        wanted = f"shape {list(shape)}, as quantization_config and the other parts of the matrix say"
        raise unreadable(key, wanted, tensor)
    return check_kind(key, tensor, kind)


def check_kind(key: str, tensor: StoredTensor, kind: PartKind = "floats") -> StoredTensor:
    """The part of a quantized matrix, of any shape.

    Raises:
        CheckpointError: it has another type: integers where scales belong mean something else.
    """
    name = tensor.dtype.name
    is_right = {
        "floats": name in _FLOATS,
        "words": name == "int32",
        "integers": tensor.dtype.kind in "iu",
    }
    if not is_right[kind]:
        raise unreadable(key, {"words": "int32", "integers": "integers"}.get(kind, " or ".join(_FLOATS)), tensor)
    return tensor


def check_groups(key: str, stored: StoredTensor, inputs: int, groups: int) -> NDArray[np.int64]:
    """The group of each input.

    Raises:
        CheckpointError: they are not one integer for each input, from 0 to the last group.
    """
    given = check_shape(key, stored, (inputs,), "integers").open().astype(np.int64)
    if given.min() < 0 or given.max() >= groups:
        raise unreadable(key, f"groups from 0 to {groups - 1}", None, f"groups from {given.min()} to {given.max()}")
    return given


def read_block(config: Config, name: str) -> tuple[int, int]:
    """Rows and columns that share a scale.

    Raises:
        CheckpointError: the field has other values than two whole numbers above 0.
    """
    height, width = config.numbers(name, 2)
    if not (height.is_integer() and width.is_integer() and max(height, width) < 1 << 31):
        raise config.refusal(name, "two whole numbers above 0")
    return int(height), int(width)


def float8_matrix(values: StoredTensor, key: str, scale: StoredTensor, block: tuple[int, int] | None) -> Float8Matrix:
    """A matrix of float8 whose scale fits it.

    Args:
        values: the matrix.
        key: name of the scale.
        scale: the scale.
        block: rows and columns that share a scale; None for one scale, or one for each row.

    Raises:
        CheckpointError: the scale has another shape.
    """
    rows, columns = values.shape
    check_kind(key, scale)
    if block is not None:
        check_shape(key, scale, (-(-rows // block[0]), -(-columns // block[1])))
    elif scale.shape not in ((), (1,), (1, 1), (rows,)):
        check_shape(key, scale, (rows, 1))
    return Float8Matrix(values.file, values.shape, values, scale, block)


def unreadable(key: str, expected: str, tensor: StoredTensor | None, got: str = "no such tensor") -> CheckpointError:
    """The error that refuses a part of a quantized matrix."""
    return CheckpointError(
        f"weights: {key}",
        got=got if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}",
        expected=expected,
        fix="The file is damaged, or config.json belongs to another one; fetch both again.",
    )
