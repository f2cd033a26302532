"""The integer weights of a bundle: quantized once, stored once, shared by all of its graphs.

Each shard is a safetensors file; graphs point into it as ONNX external data, by offset and length. Integers of 4 bits
are stored in pairs as bytes, since safetensors has no such type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray

from edgekv.spec.tensors import EMBEDDING
from exporters.quantize.matrices import QuantizedMatrices
from exporters.quantize.reference import Tensors
from exporters.quantize.shards import Extent, Streamed, write_shard
from quant import Encoding, QuantizedWeight, pack_int4

_ONNX_TYPES = {
    "int4": onnx.TensorProto.INT4,
    "int8": onnx.TensorProto.INT8,
    "uint8": onnx.TensorProto.UINT8,
    "uint16": onnx.TensorProto.UINT16,
    "float32": onnx.TensorProto.FLOAT,
}

_TABLE_ROWS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of a matrix: `count` blocks of `rows` inputs in each column."""

    count: int
    rows: int


class MatrixNames(NamedTuple):
    """Names of the tensors of a stored matrix.

    Attributes:
        integers: `[in, out]`.
        bits: of an integer.
        columns: number of outputs.
        scales: `[out]`.
        block_scales: `[in / block, out]`, if it has blocks.
        blocks: their sizes, if it has blocks.
    """

    integers: str
    bits: int
    columns: int
    scales: str
    block_scales: str | None
    blocks: Blocks | None


@dataclass(frozen=True, slots=True)
class _Place:
    file: str
    dtype: str
    shape: tuple[int, ...]
    extent: Extent


class WeightStore:
    """Writes the weights of graphs shard by shard, so that one layer is in memory at a time."""

    def __init__(self, tensors: Tensors, matrices: QuantizedMatrices, folder: Path) -> None:
        self._tensors = tensors
        self._matrices = matrices
        self._folder = folder
        self._parts: dict[str, MatrixNames] = {}
        self._encodings: dict[str, Encoding] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pending: dict[str, NDArray[Any] | Streamed] = {}
        self._quantized: dict[str, QuantizedWeight] = {}
        self._places: dict[str, _Place] = {}

    def matrix(self, key: str, *, head: int | None, gain: float) -> MatrixNames:
        """Where a matrix, or one head's columns of it, is stored."""
        part = key if head is None else f"{key}.h{head}"
        if part not in self._parts:
            if key not in self._quantized:
                self._quantized[key] = self._matrices[key]
            weight = self._quantized[key]
            if head is not None:
                width = self._tensors.spec.head_dim
                weight = weight.columns(head * width, (head + 1) * width)
            self._parts[part] = self._put(part, weight, gain)
        return self._parts[part]

    def tensor(self, key: str, *, head: int | None = None) -> tuple[str, Encoding]:
        """Name and encoding of a tensor, or of one head's part of a bias, in 16 bits with one scale."""
        name = (key if head is None else f"{key}.h{head}") + ".uint16"
        if name not in self._encodings:
            self._encodings[name], self._pending[name] = self._sixteen_bits(key, head)
        return name, self._encodings[name]

    def flush(self, shard: str) -> None:
        """Write the pending tensors to `<shard>.safetensors` and free their values."""
        path = self._folder / f"{shard}.safetensors"
        for name, extent in write_shard(path, self._pending).items():
            values = self._pending[name]
            dtype = "int4" if name in self._shapes else np.dtype(values.dtype).name
            self._places[name] = _Place(path.name, dtype, self._shapes.get(name, values.shape), extent)
        self._pending.clear()
        self._quantized.clear()

    def initializer(self, name: str) -> onnx.TensorProto:
        """The stored tensor as an ONNX initializer that points into its shard."""
        place = self._places[name]
        proto = onnx.TensorProto(
            name=name,
            data_type=_ONNX_TYPES[place.dtype],
            dims=place.shape,
            data_location=onnx.TensorProto.EXTERNAL,
        )
        for key, value in (
            ("location", place.file),
            ("offset", place.extent.offset),
            ("length", place.extent.bytes),
        ):
            proto.external_data.add(key=key, value=str(value))
        return proto

    def _sixteen_bits(self, key: str, head: int | None) -> tuple[Encoding, NDArray[Any] | Streamed]:
        spec = self._tensors.spec
        if key == EMBEDDING:  # the only tensor too large for memory in float32
            tables = [slice(first, first + _TABLE_ROWS_AT_ONCE) for first in range(0, spec.vocab, _TABLE_ROWS_AT_ONCE)]
            ends = [(rows.min(), rows.max()) for rows in (self._tensors.tensor(key, each) for each in tables)]
            encoding = _covering(min(low for low, _ in ends), max(high for _, high in ends))

            def blocks() -> Iterator[NDArray[Any]]:
                return (encoding.quantize(self._tensors.tensor(key, each)) for each in tables)

            return encoding, Streamed(np.uint16, (spec.vocab, spec.hidden), blocks)
        values = self._tensors.tensor(key)
        if head is not None:
            values = values[head * spec.head_dim : (head + 1) * spec.head_dim]
        encoding = _covering(values.min(), values.max())
        return encoding, encoding.quantize(values)

    def _put(self, part: str, weight: QuantizedWeight, gain: float) -> MatrixNames:
        grid, (rows, columns) = weight.grid, weight.integers.shape
        integers, scales, block_scales, blocks = f"{part}.{grid.type.stored}", part + ".scale", None, None
        if grid.type.is_packed:
            self._shapes[integers] = (rows, columns)
            self._pending[integers] = pack_int4(weight.integers)
        else:
            self._pending[integers] = np.ascontiguousarray(weight.integers)
        self._pending[scales] = grid.scales * np.float32(gain)
        if grid.block_scales is not None:
            block_scales = part + ".block_scale"
            self._pending[block_scales] = grid.block_scales
            blocks = Blocks(len(grid.block_scales), rows // len(grid.block_scales))
        return MatrixNames(integers, grid.type.bits, columns, scales, block_scales, blocks)


def _covering(low: np.floating[Any], high: np.floating[Any]) -> Encoding:
    return Encoding.asymmetric(float(low), float(high), "u16")
