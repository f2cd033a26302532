"""What quantizing a layer gives, in a folder: its integers, the observed ranges, and the residual after it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.errors import UsageError
from edgekv.machine.json_file import read_json
from exporters.quantize.reference import Floats
from exporters.quantize.shards import Streamed, write_shard
from exporters.quantize.windows import Windows
from quant import WEIGHT_TYPES, Grid, QuantizedWeight, Range, WeightDtype

_RECORD = "layer.json"
_TENSORS = "tensors.safetensors"
_SHARED = "shared."
_DTYPES = ("float32", "int8", "uint8")


class _Tensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize


class _Matrix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dtype: WeightDtype


class _Extremes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    low: float
    high: float


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    matrices: dict[str, _Matrix]
    ranges: dict[str, _Extremes]
    tensors: dict[str, _Tensor]


class LayerFile:
    """A quantized layer on disk; its tensors are read on access.

    The file stays open, so that clearing the store meanwhile does no harm.
    """

    def __init__(self, folder: Path, file: BinaryIO, record: _Record) -> None:
        self._folder = folder
        self._file = file
        self._record = record

    @classmethod
    def open(cls, folder: Path) -> LayerFile:
        """Open the layer in a folder.

        Raises:
            UsageError: it is missing, or its record does not fit its file.
        """
        expected, fix = "a quantized layer", "Remove the folder above it, and run the same command again."
        record = read_json(folder / _RECORD, _Record, expected=expected, fix=fix, error=UsageError)
        try:
            found = cls(folder, (folder / _TENSORS).open("rb"), record)
        except OSError as error:
            raise UsageError(str(folder / _TENSORS), got=error.strerror, expected=expected, fix=fix) from None
        if wrong := found._misfit():
            raise UsageError(str(folder / _RECORD), got=f"{wrong} that does not fit", expected=expected, fix=fix)
        return found

    @staticmethod
    def write(
        folder: Path,
        matrices: Mapping[str, QuantizedWeight],
        ranges: Mapping[str, Range],
        hidden: Windows | None,
        shared: Mapping[str, Floats] = MappingProxyType({}),
    ) -> None:
        """Write a layer into a folder, which is made; `shared` are its keys and values that later layers read."""
        folder.mkdir(exist_ok=True)
        tensors: dict[str, NDArray[Any] | Streamed] = {}
        if hidden is not None:
            tensors["hidden"] = Streamed(np.float32, hidden.shape, lambda: hidden)
        tensors |= {_SHARED + name: rows for name, rows in shared.items()}
        for name, weight in matrices.items():
            tensors |= {f"{name}.integers": weight.integers, f"{name}.scales": weight.scales}
            if weight.grid.block_scales is not None:
                tensors[f"{name}.block_scales"] = weight.grid.block_scales
        tensors |= {f"{name}.sample": seen.sample for name, seen in ranges.items() if seen.sample.size}
        extents = write_shard(folder / _TENSORS, tensors)
        record = _Record(
            matrices={name: _Matrix(dtype=weight.grid.dtype) for name, weight in matrices.items()},
            ranges={name: _Extremes(low=seen.low, high=seen.high) for name, seen in ranges.items()},
            tensors={
                name: _Tensor(dtype=np.dtype(tensors[name].dtype).name, shape=tensors[name].shape, offset=extent.offset)
                for name, extent in extents.items()
            },
        )
        (folder / _RECORD).write_bytes(msgspec.json.encode(record))

    def check(self, matrices: Mapping[str, tuple[int, int]]) -> None:
        """Check that it has these matrices, `[out, in]`.

        Raises:
            UsageError: it is the layer of another decoder: its record was forged.
        """
        found = {name: self._record.tensors[f"{name}.integers"].shape[::-1] for name in self._record.matrices}
        if found != dict(matrices):
            raise self._other("other matrices")

    def check_residual(self, shape: tuple[int, ...]) -> None:
        """Check that it has a residual of this shape.

        Raises:
            UsageError: it is the layer of another decoder: its record was forged.
        """
        found = self._record.tensors.get("hidden")
        if found is None or found.shape != shape:
            raise self._other("no residual" if found is None else f"a residual {found.shape}")

    def _other(self, found: str) -> UsageError:
        fix = "Remove the folder above it, and run the same command again."
        return UsageError(str(self._folder), got=found, expected="those of its layer", fix=fix)

    def _misfit(self) -> str | None:
        """A part of the record that contradicts itself or the file; a record that was forged has the right hash."""
        record, wanted = self._record, dict[str, tuple[str, tuple[int, ...]]]()
        size = os.fstat(self._file.fileno()).st_size
        for name, tensor in record.tensors.items():
            if tensor.dtype not in _DTYPES or min(tensor.shape, default=0) < 0:
                return name
            if not 0 <= tensor.offset <= size - tensor.bytes:
                return name
        for name, each in record.matrices.items():
            shape = record.tensors[f"{name}.integers"].shape if f"{name}.integers" in record.tensors else ()
            if len(shape) != 2:
                return name
            wanted |= {f"{name}.integers": ("int8", shape), f"{name}.scales": ("float32", shape[1:])}
            if (block := WEIGHT_TYPES[each.dtype].block) is not None:
                wanted[f"{name}.block_scales"] = ("uint8", (shape[0] // block, shape[1]))
        found = {name: (tensor.dtype, tensor.shape) for name, tensor in record.tensors.items()}
        if missing := [name for name, each in wanted.items() if found.get(name) != each]:
            return missing[0]
        allowed = {f"{name}.sample" for name in record.ranges} | {"hidden"}
        for name in found.keys() - wanted.keys():
            if name.startswith(_SHARED) and found[name][0] == "float32" and len(found[name][1]) == 4:
                continue
            dimensions = 4 if name == "hidden" else 1
            if name not in allowed or found[name][0] != "float32" or len(found[name][1]) != dimensions:
                return name
        return next((name for name, each in record.ranges.items() if not each.low <= each.high), None)

    @property
    def names(self) -> list[str]:
        """Names of its matrices."""
        return list(self._record.matrices)

    def matrix(self, name: str) -> QuantizedWeight:
        """One of its matrices."""
        blocks = f"{name}.block_scales"
        grid = Grid(
            self._record.matrices[name].dtype,
            self._read(f"{name}.scales"),
            self._read(blocks) if blocks in self._record.tensors else None,
        )
        return QuantizedWeight(self._read(f"{name}.integers"), grid)

    def ranges(self) -> dict[str, Range]:
        """The ranges observed in this layer."""
        found = {}
        for name, seen in self._record.ranges.items():
            sample = f"{name}.sample"
            found[name] = Range(seen.low, seen.high, self._read(sample) if sample in self._record.tensors else None)
        return found

    def shared(self) -> dict[str, Floats]:
        """The keys and values that later layers read, `Quantizer.shared_rows`."""
        names = [name for name in self._record.tensors if name.startswith(_SHARED)]
        return {name.removeprefix(_SHARED): self._read(name) for name in names}

    def hidden(self) -> Windows:
        """The residual after the layer, `Quantizer.hidden`, read some windows at a time."""
        place = self._record.tensors["hidden"]
        return Windows(self._file, place.shape, place.offset)

    def _read(self, name: str) -> NDArray[Any]:
        place = self._record.tensors[name]
        self._file.seek(place.offset)
        values = np.empty(place.shape, place.dtype)
        self._file.readinto(values.data)  # type: ignore[attr-defined]
        return values


class LayerMatrices:
    """The quantized matrices of a decoder by name, read from the files of its layers on access."""

    def __init__(self, layers: Sequence[LayerFile]) -> None:
        self._layers = {name: layer for layer in layers for name in layer.names}

    def __getitem__(self, key: str) -> QuantizedWeight:
        return self._layers[key].matrix(key)
