"""The integer weights of a bundle: quantized once, stored once, shared by all of its graphs.

Each shard is a safetensors file; graphs point into it as ONNX external data, by offset and length. Integers of 4 bits
lie there in bytes of two, since safetensors has no such type.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from safetensors.numpy import save

from exporters.quantize import QuantizedMatrices
from exporters.reference import Tensors
from quant import Encoding, QuantizedWeight, pack_int4, weight_bits

_ONNX_TYPES = {
    "int4": onnx.TensorProto.INT4,
    "int8": onnx.TensorProto.INT8,
    "uint8": onnx.TensorProto.UINT8,
    "uint16": onnx.TensorProto.UINT16,
    "float32": onnx.TensorProto.FLOAT,
}


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a matrix is divided: `count` blocks of `rows` inputs in each of its `columns`."""

    count: int
    rows: int
    columns: int


class MatrixNames(NamedTuple):
    """What a stored matrix is made of.

    Attributes:
        integers: `[in, out]`.
        scales: `[out]`.
        block_scales: `[in / block, out]`, if it has blocks.
        blocks: their shape, if it has blocks.
    """

    integers: str
    scales: str
    block_scales: str | None
    blocks: Blocks | None


@dataclass(frozen=True, slots=True)
class _Place:
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


class WeightStore:
    """Writes what graphs ask for shard by shard, so that one layer is in memory at a time."""

    def __init__(self, tensors: Tensors, matrices: QuantizedMatrices, folder: Path) -> None:
        self._tensors = tensors
        self._matrices = matrices
        self._folder = folder
        self._parts: dict[str, MatrixNames] = {}
        self._encodings: dict[str, Encoding] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pending: dict[str, NDArray[Any]] = {}
        self._quantized: dict[str, QuantizedWeight] = {}
        self._places: dict[str, _Place] = {}

    def matrix(self, key: str, *, head: int | None, gain: float) -> MatrixNames:
        """Names of what a matrix, or one head's columns of it, is stored as."""
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
        """Name and encoding of a tensor, or of one head's part of a bias, under one 16-bit scale."""
        name = (key if head is None else f"{key}.h{head}") + ".uint16"
        if name not in self._encodings:
            values = self._tensors.tensor(key)
            if head is not None:
                width = self._tensors.spec.head_dim
                values = values[head * width : (head + 1) * width]
            encoding = Encoding.asymmetric(float(values.min()), float(values.max()), "u16")
            self._pending[name] = encoding.quantize(values)
            self._encodings[name] = encoding
        return name, self._encodings[name]

    def flush(self, shard: str) -> None:
        """Write what is pending to `<shard>.safetensors` and forget the values."""
        path = self._folder / f"{shard}.safetensors"
        path.write_bytes(save(self._pending))  # save_file would make it readable by its owner alone
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for name, values in self._pending.items():
            begin, end = header[name]["data_offsets"]
            dtype = "int4" if name in self._shapes else str(values.dtype)
            shape = self._shapes.get(name, values.shape)
            self._places[name] = _Place(path.name, dtype, shape, 8 + length + begin, end - begin)
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
        for key, value in (("location", place.file), ("offset", place.offset), ("length", place.bytes)):
            proto.external_data.add(key=key, value=str(value))
        return proto

    def _put(self, part: str, weight: QuantizedWeight, gain: float) -> MatrixNames:
        grid, (rows, columns) = weight.grid, weight.integers.shape
        bits = weight_bits(grid.dtype)
        integers, scales, block_scales, blocks = f"{part}.int{bits}", part + ".scale", None, None
        if bits == 4:
            self._shapes[integers] = (rows, columns)
            self._pending[integers] = pack_int4(weight.integers)
        else:
            self._pending[integers] = np.ascontiguousarray(weight.integers)
        self._pending[scales] = grid.scales * np.float32(gain)
        if grid.block_scales is not None:
            block_scales = part + ".block_scale"
            self._pending[block_scales] = grid.block_scales
            blocks = Blocks(len(grid.block_scales), rows // len(grid.block_scales), columns)
        return MatrixNames(integers, scales, block_scales, blocks)
