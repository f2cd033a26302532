"""Matrices of float8 (e4m3) with a scale for all, for each row, or for each block."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from exporters.checkpoint.fold import EVERY, Floats, Rows
from exporters.checkpoint.quantized.matrix import QuantizedMatrix, Storage, check_kind, check_shape
from exporters.checkpoint.stored import StoredTensor

_EVERY_BYTE = np.arange(256, dtype=np.uint8)


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
        table = _EVERY_BYTE.view(stored.dtype).astype(np.float32)
        values: Floats = table[stored.view(np.uint8)]
        scales = self.scale.read(EVERY) if self.scale.shape else self.scale.open().astype(np.float32)
        if self.block is None:
            values *= scales.reshape(-1, 1)[rows] if scales.size > 1 else scales.reshape(1, 1)
            return values
        height, width = self.block
        places = np.arange(self.shape[0])[rows] // height
        values *= np.repeat(scales, width, axis=1)[places, : self.shape[1]]
        return values

    def storage(self) -> Storage:
        return Storage("int8", "float8")


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
