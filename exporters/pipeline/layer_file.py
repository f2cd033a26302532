"""What quantizing a layer gives, in a folder: files of the bundle, the observed ranges, and the residual after it."""

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

from edgekv.bundle import BundleWeights, WeightPlaces, is_plain_path
from edgekv.errors import EdgeKVError, UsageError
from edgekv.machine.json_file import read_json
from exporters.graphs.weights import TensorStream, write_shard
from exporters.quantize.reference import Floats
from exporters.quantize.windows import Windows
from quant import QuantizedWeight, Range

_RECORD = "layer.json"
_TENSORS = "tensors.safetensors"
_SHARED = "shared."
_SUFFIX = ".safetensors"


class _Tensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize


class _Extremes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    low: float
    high: float


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    places: WeightPlaces
    ranges: dict[str, _Extremes]
    tensors: dict[str, _Tensor]
    has_residual: bool
    unreached: tuple[str, ...] = ()


class LayerFile:
    """A quantized layer on disk; its tensors are read on access.

    Its files stay open, so that clearing the store meanwhile does no harm.

    Attributes:
        places: of its weights, in files of the bundle.
    """

    def __init__(self, folder: Path, file: BinaryIO, record: _Record) -> None:
        self.places = record.places
        self._folder = folder
        self._file = file
        self._record = record
        self._weights = BundleWeights(folder, record.places)

    @classmethod
    def open(cls, folder: Path) -> LayerFile:
        """Open the layer in a folder.

        Raises:
            UsageError: it is missing, or its record does not fit its file.
        """
        expected, fix = "a quantized layer", "Remove the folder above it, and run the same command again."
        record = read_json(folder / _RECORD, _Record, expected=expected, fix=fix, error=UsageError)
        try:
            layer = cls(folder, (folder / _TENSORS).open("rb"), record)
        except OSError as error:
            raise UsageError(str(folder / _TENSORS), got=error.strerror, expected=expected, fix=fix) from None
        if wrong := layer._misfit():
            raise UsageError(str(folder / _RECORD), got=f"{wrong} that does not fit", expected=expected, fix=fix)
        layer.weights.files  # noqa: B018  # mapped before anything can happen to the folder
        return layer

    @staticmethod
    def write(
        folder: Path,
        places: WeightPlaces,
        ranges: Mapping[str, Range],
        hidden: Windows | None,
        shared: Mapping[str, Floats] = MappingProxyType({}),
        unreached: Sequence[str] = (),
    ) -> None:
        """Write what is not part of the bundle into the folder of the layer's weights.

        Args:
            folder: the folder.
            places: of the weights there.
            ranges: of the results of the layer.
            hidden: the residual after it; None after the head, or to leave it out.
            shared: its keys and values that later layers read.
            unreached: see `Quantizer.unreached`.
        """
        tensors: dict[str, NDArray[Any] | TensorStream] = {}
        if hidden is not None:
            tensors["hidden"] = TensorStream(np.float32, hidden.shape, lambda: hidden)
        tensors |= {_SHARED + name: rows for name, rows in shared.items()}
        tensors |= {f"{name}.sample": seen.sample for name, seen in ranges.items() if seen.sample.size}
        extents = write_shard(folder / _TENSORS, tensors)
        record = _Record(
            places=places,
            has_residual=hidden is not None,
            unreached=tuple(unreached),
            ranges={name: _Extremes(low=seen.low, high=seen.high) for name, seen in ranges.items()},
            tensors={
                name: _Tensor(dtype=np.dtype(tensors[name].dtype).name, shape=tensors[name].shape, offset=extent.offset)
                for name, extent in extents.items()
            },
        )
        (folder / _RECORD).write_bytes(msgspec.json.encode(record))

    @staticmethod
    def leaves_out_residual(folder: Path) -> bool:
        """Whether a layer, if there is one in a folder, was written without the residual after it."""
        try:
            return not read_json(folder / _RECORD, _Record, expected="", fix="").has_residual
        except EdgeKVError:
            return False

    def check(self, asked: WeightPlaces) -> None:
        """Check that it has the weights that graphs ask for, wherever they are.

        Raises:
            UsageError: it is the layer of another decoder: its record was forged.
        """
        matrices, tensors = self.places.matrices, self.places.tensors
        if matrices.keys() != asked.matrices.keys() or any(
            (matrices[name].dtype, matrices[name].rows, matrices[name].columns, matrices[name].heads)
            != (place.dtype, place.rows, place.columns, place.heads)
            for name, place in asked.matrices.items()
        ):
            raise self._other("other matrices")
        if any(name not in tensors or tensors[name].shape != place.shape for name, place in asked.tensors.items()):
            raise self._other("other norms or biases")

    def check_residual(self, shape: tuple[int, ...]) -> None:
        """Check that it has a residual of this shape.

        Raises:
            UsageError: it is the layer of another decoder: its record was forged.
        """
        residual = self._record.tensors.get("hidden")
        if residual is None or residual.shape != shape:
            raise self._other("no residual" if residual is None else f"a residual {residual.shape}")

    def _other(self, got: str) -> UsageError:
        fix = "Remove the folder above it, and run the same command again."
        return UsageError(str(self._folder), got=got, expected="those of its layer", fix=fix)

    def _misfit(self) -> str | None:
        """A part of the record that contradicts itself or the file; a record that was forged has the right hash."""
        record, size = self._record, os.fstat(self._file.fileno()).st_size
        for name, tensor in record.tensors.items():
            if tensor.dtype != "float32" or min(tensor.shape, default=0) < 0:
                return name
            if not 0 <= tensor.offset <= size - tensor.bytes:
                return name
        sizes: dict[str, int] = {}
        for name, file, extent in record.places.extents():
            if not is_plain_path(file) or (self._folder / file).suffix != _SUFFIX:
                return name
            if file not in sizes:
                sizes[file] = (self._folder / file).stat().st_size if (self._folder / file).is_file() else 0
            if extent.offset + extent.bytes > sizes[file]:
                return name
        allowed = {f"{name}.sample" for name in record.ranges} | {"hidden"}
        for name, tensor in record.tensors.items():
            dimensions = 4 if name == "hidden" or name.startswith(_SHARED) else 1
            if len(tensor.shape) != dimensions or not (name in allowed or name.startswith(_SHARED)):
                return name
        return next((name for name, seen in record.ranges.items() if not seen.low <= seen.high), None)

    @property
    def weights(self) -> BundleWeights:
        """Reads its weights, whose scales include gains."""
        return self._weights

    @property
    def unreached(self) -> tuple[str, ...]:
        """Experts of the layer that no token of the calibration text has chosen, as `LAYER.EXPERT`."""
        return self._record.unreached

    def ranges(self) -> dict[str, Range]:
        """The ranges observed in this layer."""
        ranges = {}
        for name, seen in self._record.ranges.items():
            sample = f"{name}.sample"
            ranges[name] = Range(seen.low, seen.high, self._read(sample) if sample in self._record.tensors else None)
        return ranges

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
        self._layers = {name: layer for layer in layers for name in layer.places.matrices}

    def __getitem__(self, key: str) -> QuantizedWeight:
        return self._layers[key].weights.matrix(key)
