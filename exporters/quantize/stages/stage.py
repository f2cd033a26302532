"""A stage of quantization on disk: a layer's integers, observed ranges, and the residual after it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import atomic_directory
from exporters.quantize.reference import Floats
from exporters.quantize.shards import write_shard
from quant import WEIGHT_TYPES, Grid, QuantizedWeight, Range, WeightDtype

RECORD = "stage.json"
_TENSORS = "tensors.safetensors"


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
    sha256: str
    matrices: dict[str, _Matrix]
    ranges: dict[str, _Extremes]
    tensors: dict[str, _Tensor]


class Stage:
    """A stage on disk; its tensors are read on access.

    The file stays open, so that clearing the cache meanwhile does no harm.
    """

    def __init__(self, file: BinaryIO, record: _Record) -> None:
        self._file = file
        self._record = record

    @classmethod
    def open(cls, folder: Path) -> Stage | None:
        """The stage in a folder; None if it is missing or damaged."""
        try:
            record = msgspec.json.decode((folder / RECORD).read_bytes(), type=_Record)
            file = (folder / _TENSORS).open("rb")
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        if hashlib.file_digest(file, "sha256").hexdigest() == record.sha256:
            return cls(file, record)
        file.close()
        return None

    @classmethod
    def write(
        cls,
        folder: Path,
        matrices: Mapping[str, QuantizedWeight],
        ranges: Mapping[str, Range],
        hidden: Floats | None,
    ) -> Stage:
        """Write a stage atomically, replacing an existing one."""
        tensors: dict[str, NDArray[Any]] = {} if hidden is None else {"hidden": hidden}
        for name, weight in matrices.items():
            tensors |= {f"{name}.integers": weight.integers, f"{name}.scales": weight.scales}
            if weight.grid.block_scales is not None:
                tensors[f"{name}.block_scales"] = weight.grid.block_scales
        tensors |= {f"{name}.sample": seen.sample for name, seen in ranges.items() if seen.sample.size}
        with atomic_directory(folder, force=True, marker=RECORD) as partial:
            extents = write_shard(partial / _TENSORS, tensors)
            with (partial / _TENSORS).open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            record = _Record(
                sha256=sha256,
                matrices={name: _Matrix(dtype=weight.grid.dtype) for name, weight in matrices.items()},
                ranges={name: _Extremes(low=seen.low, high=seen.high) for name, seen in ranges.items()},
                tensors={
                    name: _Tensor(dtype=tensors[name].dtype.name, shape=tensors[name].shape, offset=extent.offset)
                    for name, extent in extents.items()
                },
            )
            (partial / RECORD).write_bytes(msgspec.json.encode(record))
            # Opened before other exports of the checkpoint can replace or remove it, except on Windows, which renames
            # no folder with an open file.
            opened = None if os.name == "nt" else (partial / _TENSORS).open("rb")
        return cls(opened or (folder / _TENSORS).open("rb"), record)

    def fits(self, matrices: Mapping[str, tuple[int, int]], hidden: tuple[int, ...] | None) -> bool:
        """Whether it has these matrices `[in, out]` and a residual of this shape (None for none), all of it readable.

        A record that was changed by hand can carry the right hash.
        """
        record = self._record
        wanted: dict[str, tuple[str, tuple[int, ...]]] = {} if hidden is None else {"hidden": ("float32", hidden)}
        for name, each in record.matrices.items():
            inputs, outputs = matrices.get(name, (0, 0))
            block = WEIGHT_TYPES[each.dtype].block
            wanted |= {f"{name}.integers": ("int8", (inputs, outputs)), f"{name}.scales": ("float32", (outputs,))}
            if block is not None:
                wanted[f"{name}.block_scales"] = ("uint8", (inputs // block, outputs))
        samples = {f"{name}.sample" for name in record.ranges}
        rest = {name: each for name, each in record.tensors.items() if name not in wanted}
        size = os.fstat(self._file.fileno()).st_size
        return (
            record.matrices.keys() == matrices.keys()
            and {n: (t.dtype, t.shape) for n, t in record.tensors.items() if n in wanted} == wanted
            and all(name in samples and (t.dtype, len(t.shape)) == ("float32", 1) for name, t in rest.items())
            and all(min(t.shape, default=0) >= 0 <= t.offset <= size - t.bytes for t in record.tensors.values())
            and all(each.low <= each.high for each in record.ranges.values())
        )

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

    def hidden(self) -> Floats:
        """The residual after the layer, `Quantizer.hidden`."""
        return self._read("hidden")

    def _read(self, name: str) -> NDArray[Any]:
        place = self._record.tensors[name]
        self._file.seek(place.offset)
        values = np.empty(place.shape, place.dtype)
        self._file.readinto(values.data)  # type: ignore[attr-defined]
        return values


class StagedMatrices:
    """The quantized matrices of a decoder by name, read from their stages on access."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = {name: stage for stage in stages for name in stage.names}

    def __getitem__(self, key: str) -> QuantizedWeight:
        return self._stages[key].matrix(key)
