"""Integer weights: a symmetric grid for each output channel, or for each block of inputs of each channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

WeightDtype = Literal["int8", "int4", "lpbq32", "lpbq64", "lpbq128"]
WEIGHT_DTYPES: tuple[WeightDtype, ...] = get_args(WeightDtype)
LPBQ_LEVELS = 15
"""The greatest integer that multiplies a channel's scale in a block (QNN's BLOCKWISE_EXPANSION with 4 bits)."""


def weight_bits(dtype: WeightDtype) -> int:
    """Bits of an integer, scales aside."""
    return 8 if dtype == "int8" else 4


def integer_limits(dtype: WeightDtype) -> tuple[int, int]:
    """The least and the greatest integer: of 8 bits the same on both sides, of 4 all, since one level of 16 counts."""
    return (-127, 127) if weight_bits(dtype) == 8 else (-8, 7)


def block_rows(dtype: WeightDtype) -> int | None:
    """Inputs that share a block scale, or None if all inputs of a channel share one scale."""
    return int(dtype.removeprefix("lpbq")) if dtype.startswith("lpbq") else None


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers that a matrix `[in, out]` may hold: integers from least to most, times a step.

    Attributes:
        dtype: bits of the integers and rows of a block.
        scales: float32 `[out]`, one for each output channel.
        block_scales: uint8 `[in / block, out]`, 1 to 15, only for LPBQ (low power blockwise quantization): the step
            of a block is the channel's scale times this integer.
    """

    dtype: WeightDtype
    scales: NDArray[np.float32]
    block_scales: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        if (block_rows(self.dtype) is None) != (self.block_scales is None):
            raise ValueError(f"block_scales: {self.dtype} has them if and only if it has blocks")

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the greatest integer; see `integer_limits`."""
        return integer_limits(self.dtype)

    def steps(self, rows: int) -> NDArray[np.float32]:
        """The distance of neighbouring numbers, `[in, out]`, for a matrix of so many rows; not to be written to."""
        if self.block_scales is None:
            return np.broadcast_to(self.scales, (rows, len(self.scales)))
        return np.repeat(self.block_scales.astype(np.float32) * self.scales, rows // len(self.block_scales), axis=0)

    @classmethod
    def joined(cls, grids: Sequence[Grid]) -> Grid:
        """The grid of matrices side by side, at least one."""
        blocks = [grid.block_scales for grid in grids if grid.block_scales is not None]
        scales = np.concatenate([grid.scales for grid in grids])
        return cls(grids[0].dtype, scales, np.concatenate(blocks, axis=1) if blocks else None)

    def columns(self, start: int, stop: int) -> Grid:
        """The grid of the output channels from `start` up to `stop`."""
        blocks = None if self.block_scales is None else np.ascontiguousarray(self.block_scales[:, start:stop])
        return Grid(self.dtype, np.ascontiguousarray(self.scales[start:stop]), blocks)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix as integers, zero point 0.

    Attributes:
        integers: int8 `[in, out]`, within the grid's limits.
        grid: what the integers stand for.
    """

    integers: NDArray[np.int8]
    grid: Grid

    @property
    def scales(self) -> NDArray[np.float32]:
        """`[out]`, one for each output channel."""
        return self.grid.scales

    def columns(self, start: int, stop: int) -> QuantizedWeight:
        """The output channels from `start` up to `stop`: the same integers, so a head is a slice of the whole."""
        return QuantizedWeight(np.ascontiguousarray(self.integers[:, start:stop]), self.grid.columns(start, stop))

    def dequantize(self) -> NDArray[np.float32]:
        """float32 `[in, out]`."""
        values: NDArray[np.float32] = self.integers.astype(np.float32)
        if self.grid.block_scales is None:
            values *= self.scales
        else:
            steps = self.grid.block_scales.astype(np.float32) * self.scales
            blocks = values.reshape(len(steps), -1, values.shape[1])
            blocks *= steps[:, None]
        return values


def pack_int4(integers: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Two integers in a byte, the first in the low half, as ONNX packs INT4: uint8 `[ceil(size / 2)]`."""
    flat = integers.reshape(-1).view(np.uint8) & np.uint8(0x0F)
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    packed: NDArray[np.uint8] = flat[0::2] | (flat[1::2] << np.uint8(4))
    return packed


def unpack_int4(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    """What `pack_int4` packed: int8 `[2 * size]`, from -8 to 7."""
    pairs = np.stack((packed << np.uint8(4), packed), axis=-1).view(np.int8)
    integers: NDArray[np.int8] = (pairs >> np.int8(4)).reshape(-1)
    return integers
