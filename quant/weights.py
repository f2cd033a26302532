"""Integer weights: a symmetric grid for each output channel, or for each block of inputs of each channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

WeightDtype = Literal["int8", "int4", "lpbq32", "lpbq64", "lpbq128"]
LPBQ_LEVELS = 15
"""The maximum block scale: an integer of 4 bits that multiplies a channel's scale (QNN's BLOCKWISE_EXPANSION)."""


@dataclass(frozen=True, slots=True)
class WeightType:
    """One type of integer weights.

    Attributes:
        bits: of an integer, scales aside; 4 or 8.
        limits: the minimum and maximum integer.
        block: inputs of a channel that share a block scale; None if all inputs of a channel share one scale.
        recipe: the recipe that ships with edgekv and gives this type to most matrices.
        engines: names of the engines that run it.
    """

    bits: int
    limits: tuple[int, int]
    block: int | None
    recipe: str
    engines: frozenset[str]

    @property
    def is_packed(self) -> bool:
        """Whether a byte contains two integers."""
        return self.bits == 4

    @property
    def stored(self) -> str:
        """The type of the integers in files."""
        return f"int{self.bits}"

    def matrix_bytes(self, inputs: int, outputs: int) -> int:
        """Bytes of a matrix, with a float32 scale for each output and a byte for each block scale."""
        blocks = inputs // self.block if self.block else 0
        return inputs * outputs * self.bits // 8 + (4 + blocks) * outputs

    def packed_bytes(self, inputs: int, outputs: int) -> int:
        """The bytes of a matrix that contain two integers."""
        return inputs * outputs // 2 if self.is_packed else 0


_BYTE = (-127, 127)  # symmetric
_NIBBLE = (-8, 7)  # with 16 levels, each one matters
_ONNX = frozenset({"cpu", "htp"})

WEIGHT_TYPES: dict[WeightDtype, WeightType] = {
    "int8": WeightType(8, _BYTE, None, "w8a16", _ONNX | {"litert", "tflite"}),
    "int4": WeightType(4, _NIBBLE, None, "w4a16", _ONNX | {"litert"}),
    "lpbq32": WeightType(4, _NIBBLE, 32, "w4a16-lpbq32", _ONNX),
    "lpbq64": WeightType(4, _NIBBLE, 64, "w4a16-lpbq64", _ONNX),
    "lpbq128": WeightType(4, _NIBBLE, 128, "w4a16-lpbq128", _ONNX),
}
"""All weight types by name. LPBQ is low power blockwise quantization."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The values that a matrix `[in, out]` can represent: an integer within limits, times a step.

    Attributes:
        dtype: the weight type.
        scales: float32 `[out]`, one for each output channel.
        block_scales: uint8 `[in / block, out]`, 1 to 15, of types with blocks: the step of a block is the channel's
            scale times this integer.
    """

    dtype: WeightDtype
    scales: NDArray[np.float32]
    block_scales: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        if (self.type.block is None) != (self.block_scales is None):
            expected = "none" if self.type.block is None else "some"
            raise ValueError(f"block_scales: expected {expected} with {self.dtype}")

    @property
    def type(self) -> WeightType:
        """The row of `WEIGHT_TYPES`."""
        return WEIGHT_TYPES[self.dtype]

    @property
    def limits(self) -> tuple[int, int]:
        """The minimum and maximum integer."""
        return self.type.limits

    def steps(self, rows: int) -> NDArray[np.float32]:
        """The step between neighbouring numbers, `[in, out]`, for a matrix of `rows` inputs; read-only."""
        if self.block_scales is None:
            return np.broadcast_to(self.scales, (rows, len(self.scales)))
        return np.repeat(self.block_scales.astype(np.float32) * self.scales, rows // len(self.block_scales), axis=0)

    @classmethod
    def joined(cls, grids: Sequence[Grid]) -> Grid:
        """The grid of one or more matrices, concatenated."""
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
        grid: the numbers that the integers mean.
    """

    integers: NDArray[np.int8]
    grid: Grid

    @property
    def scales(self) -> NDArray[np.float32]:
        """`[out]`, one for each output channel."""
        return self.grid.scales

    def columns(self, start: int, stop: int) -> QuantizedWeight:
        """The output channels from `start` to `stop`, with the same integers: a head is a slice of the matrix."""
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
    """Pack two integers in a byte, the first in the low half, as ONNX packs INT4: uint8 `[ceil(size / 2)]`."""
    flat = integers.reshape(-1).view(np.uint8) & np.uint8(0x0F)
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    packed: NDArray[np.uint8] = flat[0::2] | (flat[1::2] << np.uint8(4))
    return packed


def unpack_int4(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Unpack the bytes of `pack_int4`: int8 `[2 * size]`, from -8 to 7."""
    pairs = np.stack((packed << np.uint8(4), packed), axis=-1).view(np.int8)
    integers: NDArray[np.int8] = (pairs >> np.int8(4)).reshape(-1)
    return integers
