"""The integer weights of a bundle: quantized once, stored once, shared by all of its graphs.

Each shard is a safetensors file; graphs point into it as ONNX external data, by offset and length.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from safetensors.numpy import save

from exporters.checkpoint import Checkpoint
from quant import Encoding, QuantizedWeight, quantize_per_channel

_ONNX_TYPES = {"int8": onnx.TensorProto.INT8, "uint16": onnx.TensorProto.UINT16, "float32": onnx.TensorProto.FLOAT}


@dataclass(frozen=True, slots=True)
class _Place:
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


class WeightStore:
    """Quantizes what graphs ask for and writes it shard by shard, so that one layer is in memory at a time."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self._checkpoint = checkpoint
        self._folder = folder
        self._pending: dict[str, NDArray[Any]] = {}
        self._quantized: dict[str, QuantizedWeight] = {}
        self._places: dict[str, _Place] = {}

    def matrix(self, key: str, *, head: int | None, gain: float) -> tuple[str, str]:
        """Names of the integers `[in, out]` and scales `[out]` of a matrix, or of one head's columns of it."""
        part = key if head is None else f"{key}.h{head}"
        names = (part + ".int8", part + ".scale")
        if not self._has(names[0]):
            if key not in self._quantized:
                self._quantized[key] = quantize_per_channel(self._checkpoint.tensor(key).T)
            weight = self._quantized[key]
            if head is not None:
                width = self._checkpoint.spec.head_dim
                weight = weight.columns(head * width, (head + 1) * width)
            self._pending[names[0]] = np.ascontiguousarray(weight.integers)
            self._pending[names[1]] = weight.scales * np.float32(gain)
        return names

    def tensor(self, key: str, *, head: int | None = None) -> tuple[str, Encoding]:
        """Name and encoding of a tensor, or of one head's part of a bias, under one 16-bit scale."""
        name = (key if head is None else f"{key}.h{head}") + ".uint16"
        values = self._checkpoint.tensor(key)
        if head is not None:
            width = self._checkpoint.spec.head_dim
            values = values[head * width : (head + 1) * width]
        encoding = Encoding.asymmetric(float(values.min()), float(values.max()), "u16")
        if not self._has(name):
            self._pending[name] = encoding.quantize(values)
        return name, encoding

    def flush(self, shard: str) -> None:
        """Write what is pending to `<shard>.safetensors` and forget the values."""
        path = self._folder / f"{shard}.safetensors"
        path.write_bytes(save(self._pending))  # save_file would make it readable by its owner alone
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for name, values in self._pending.items():
            begin, end = header[name]["data_offsets"]
            place = _Place(path.name, str(values.dtype), values.shape, 8 + length + begin, end - begin)
            self._places[name] = place
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

    def _has(self, name: str) -> bool:
        return name in self._pending or name in self._places
