"""Integer matrices of a graph as `MatMulNBits` reads them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgekv.runtime.merge.fusing import constant_of

Floats = NDArray[np.float32]

_BLOCK_ROWS = 64  # of matrices with one scale a column; int8 activations get a scale for each block
_LEAST_BLOCK_ROWS = 16  # that MatMulNBits takes
_MATRIX_AXES = 2


@dataclass(frozen=True, slots=True)
class IntegerMatrix:
    """A matrix of integers, multiplied by a step for each column and a factor for each block of a column.

    Attributes:
        integers: `[in, out]`, int8.
        steps: `[out]`.
        factors: `[blocks, out]`, uint8; None if there are no blocks.
        bits: 4 or 8.
        block_rows: rows of a block; the last block may be shorter.
    """

    integers: NDArray[np.int8]
    steps: Floats
    factors: NDArray[np.uint8] | None
    bits: int
    block_rows: int

    @property
    def blocks(self) -> int:
        """The number of blocks of a column."""
        return -(-self.integers.shape[0] // self.block_rows)

    def scales(self) -> Floats:
        """The scale of each block, `[out, blocks]`."""
        if self.factors is None:
            return np.repeat(self.steps[:, None], self.blocks, axis=1)
        return self.factors.T * self.steps[:, None]

    def packed(self) -> NDArray[np.uint8]:
        """The integers `[out, blocks, bytes of a block]`, with zero point 8 or 128; of 4 bits, the low ones first."""
        rows, columns = self.integers.shape
        zero = 1 << (self.bits - 1)
        unsigned: NDArray[np.uint8] = np.full((columns, self.blocks * self.block_rows), zero, np.uint8)
        unsigned[:, :rows] = (self.integers.T.astype(np.int16) + zero).astype(np.uint8)
        if self.bits == 4:
            unsigned = (unsigned[:, 0::2] | unsigned[:, 1::2] << 4).astype(np.uint8)
        return unsigned.reshape(columns, self.blocks, -1)

    def wide(self) -> NDArray[np.int8] | None:
        """The integers times their factors, `[in, out]`; None if they do not fit into 8 bits."""
        products = self.integers.astype(np.int32)
        if self.factors is not None:
            products *= np.repeat(self.factors, self.block_rows, axis=0)[: len(products)]
        if products.min() < -128 or products.max() > 127:
            return None
        return products.astype(np.int8)


def read_matrix(value: ir.Value | None) -> IntegerMatrix | None:
    """A constant matrix that is dequantized from integers, or several beside each other; None for any other tensor."""
    node = value.producer() if value is not None else None
    if node is None:
        return None
    if node.op_type == "Concat" and node.attributes.get_int("axis", 0) == 1:
        return _beside([read_matrix(each) for each in node.inputs])
    if node.op_type != "DequantizeLinear":
        return None
    integers, scales = constant_of(node.inputs[0]), _scales(node.inputs[1])
    if integers is None or scales is None or integers.ndim != _MATRIX_AXES or not _is_zero(node):
        return None
    bits = {"int8": 8, "int4": 4}.get(integers.dtype.name)
    steps, factors = scales
    block_rows = node.attributes.get_int("block_size", _BLOCK_ROWS)
    if bits is None or not _is_supported(block_rows) or steps.ndim != 1:
        return None
    if factors is None and ("block_size" in node.attributes or node.attributes.get_int("axis", 1) != 1):
        return None
    return IntegerMatrix(integers.astype(np.int8), steps, factors, bits, block_rows)


def _is_supported(block_rows: int) -> bool:
    return block_rows >= _LEAST_BLOCK_ROWS and block_rows & (block_rows - 1) == 0


def _beside(parts: list[IntegerMatrix | None]) -> IntegerMatrix | None:
    found = [each for each in parts if each is not None]
    if len(found) < len(parts) or len({(each.bits, each.block_rows, each.factors is None) for each in found}) != 1:
        return None
    integers = np.concatenate([each.integers for each in found], axis=1)
    factors = [each.factors for each in found if each.factors is not None]
    return IntegerMatrix(
        integers,
        np.concatenate([each.steps for each in found]),
        np.concatenate(factors, axis=1) if factors else None,
        found[0].bits,
        found[0].block_rows,
    )


def _scales(value: ir.Value | None) -> tuple[Floats, NDArray[np.uint8] | None] | None:
    """Steps of columns `[out]`, and factors of their blocks `[blocks, out]` if there are any."""
    node = value.producer() if value is not None else None
    if node is None:
        steps = constant_of(value)
        return None if steps is None else (steps.astype(np.float32), None)
    if node.op_type != "DequantizeLinear" or not _is_zero(node) or node.attributes.get_int("axis", 1) != 1:
        return None
    factors, steps = constant_of(node.inputs[0]), constant_of(node.inputs[1])
    if factors is None or steps is None:
        return None
    return steps.astype(np.float32), factors.astype(np.uint8)


def _is_zero(node: ir.Node) -> bool:
    """Whether a node that dequantizes has zero point 0."""
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return True
    zero = constant_of(node.inputs[2])
    return zero is not None and not zero.astype(np.int32).any()
