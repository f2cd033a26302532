"""The tensors of a checkpoint's safetensors files: their places and values."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from edgekv.errors import CheckpointError
from edgekv.spec import read_json

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"

_FLOATS = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
_PARTS = {  # what quantized matrices are made of
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
_NAMES = {dtype: name for name, dtype in (_FLOATS | _PARTS).items()}
# Only NaN and infinity set all of these bits, so they are found without conversion.
_EXPONENTS: dict[np.dtype[Any], np.unsignedinteger[Any]] = {
    _FLOATS["BF16"]: np.uint16(0x7F80),
    _FLOATS["F16"]: np.uint16(0x7C00),
    _FLOATS["F32"]: np.uint32(0x7F800000),
}
_MASK = re.compile(r".*\.(attn|attention)\.(masked_)?bias")  # of older programs, which no weight is called
_BLOCK_BYTES = 1 << 24
_INDEX_BYTES = 1 << 26


class CheckpointTensor(Protocol):
    """A tensor of a checkpoint, stored in any type."""

    @property
    def file(self) -> Path:
        """Where it is stored."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions, `[out, in]` for a matrix."""

    def read(self, rows: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        """Some rows as float32."""

    def count_not_finite(self) -> int:
        """Number of elements that are NaN or infinite."""

    def largest(self) -> float:
        """The largest magnitude; infinite or NaN if an element is."""


class ComputedTensor(ABC):
    """A tensor that is computed when it is read: dequantized, or merged with an adapter.

    Attributes:
        file: where it is stored.
        shape: its dimensions, `[out, in]` for a matrix.
    """

    __slots__ = ()

    file: Path
    shape: tuple[int, ...]

    @abstractmethod
    def read(self, rows: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        """Some rows as float32."""

    def count_not_finite(self) -> int:
        """Number of elements that are NaN or infinite."""
        return sum(int((~np.isfinite(self.read(rows))).sum()) for rows in row_chunks(self.shape))

    def largest(self) -> float:
        """The largest magnitude; infinite or NaN if an element is."""
        return float(np.max([np.abs(self.read(rows)).max() for rows in row_chunks(self.shape)]))


def row_chunks(shape: tuple[int, ...]) -> list[slice]:
    """Number of rows that are 16 MiB as float32."""
    step = max(1, _BLOCK_BYTES // (4 * math.prod(shape[1:])))
    return [slice(first, first + step) for first in range(0, shape[0], step)]


def same_numbers(a: CheckpointTensor, b: CheckpointTensor) -> bool:
    """Whether two tensors hold the same numbers."""
    return a.shape == b.shape and all(np.array_equal(a.read(rows), b.read(rows)) for rows in row_chunks(a.shape))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor's bytes.

    Attributes:
        file: a safetensors file.
        dtype: bfloat16, float16 or float32; of a part of a quantized matrix also an integer or float8.
        shape: its dimensions.
        offset: of its first byte in the file.
    """

    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    def open(self) -> NDArray[Any]:
        """The tensor, mapped: a page is read when it is touched."""
        return np.asarray(np.memmap(self.file, self.dtype, mode="r", offset=self.offset, shape=self.shape))

    def read(self, rows: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        """Some rows as float32."""
        return self.open()[rows].astype(np.float32)

    def count_not_finite(self) -> int:
        """Number of elements that are NaN or infinite."""
        bits = _EXPONENTS[self.dtype]
        return sum(int(np.count_nonzero((block.view(bits.dtype) & bits) == bits)) for block in self._blocks())

    def largest(self) -> float:
        """The largest magnitude; infinite or NaN if an element is."""
        # As integers, floats without their sign bit are ordered by magnitude.
        bits = _EXPONENTS[self.dtype]
        unsigned = bits.dtype.type(np.iinfo(bits.dtype).max >> 1)
        greatest = max((block.view(bits.dtype) & unsigned).max() for block in self._blocks())
        return float(np.asarray(greatest, bits.dtype).view(self.dtype))

    def _blocks(self) -> Iterator[NDArray[Any]]:
        """Chunks of rows, each mapped separately, so that read pages are released."""
        return (self.open()[rows] for rows in row_chunks(self.shape))


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the files in the index; without an index, of `model.safetensors` or else of all files.

    The library checks headers and lengths, so truncation shows here. Some may be parts of quantized matrices; see
    `check_floats`.

    Raises:
        CheckpointError: a file or a tensor of the index is missing, a file is damaged, a tensor is stored twice or is
            of another type.
    """
    places = _read_index(folder)
    if places and WHOLE not in places.values() and (folder / WHOLE).is_file():
        raise CheckpointError(
            str(folder / WHOLE),
            got=f"it beside {INDEX}, which does not name it",
            expected="the whole weights in one file, or in several with an index",
            fix="One of them is of another version: remove the one that is not wanted.",
        )
    if places:
        files = sorted({folder / name for name in places.values()})
    else:
        files = [folder / WHOLE] if (folder / WHOLE).is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            str(folder),
            got="no *.safetensors",
            expected=WHOLE,
            fix="Download the weights; pickled ones (.bin) must be converted.",
        )
    for file in files:
        if not file.is_file():
            raise CheckpointError(
                str(file), got="no regular file", expected="a safetensors file", fix="Download it again."
            )
    stored: dict[str, StoredTensor] = {}
    for file in files:
        for key, tensor in tensors_of(file):
            if key in stored and key in places:
                stale = next(shard for shard in (stored[key].file.name, file.name) if shard != places[key])
                raise CheckpointError(
                    f"{stale}: {key}",
                    got=f"a tensor that {places[key]} has too",
                    expected=f"those that {INDEX} says are in it",
                    fix="It is of another download or version: fetch it again.",
                )
            if key in stored:
                raise CheckpointError(
                    f"weights: {key}",
                    got=f"one in {stored[key].file.name} and one in {file.name}",
                    expected=f"each tensor once, or {INDEX}",
                    fix="Move the files that do not belong to the checkpoint elsewhere.",
                )
            stored[key] = tensor
    for key, name in places.items():
        if key not in stored or stored[key].file.name != name:
            raise CheckpointError(
                f"weights: {key}",
                got=f"no such tensor in {name}",
                expected=f"what {INDEX} says",
                fix="The index and the files do not belong together; download both again.",
            )
    return stored


def _read_index(folder: Path) -> dict[str, str]:
    """File names by tensor, empty without an index."""
    path = folder / INDEX
    if not path.exists():
        return {}
    places = read_json(path, limit_bytes=_INDEX_BYTES).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(
            f"{path}: weight_map", got="no table of files", expected="a file for each tensor", fix="Fetch it anew."
        )
    for name in sorted(set(places.values())):
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(
                str(folder / name),
                got="no such file",
                expected=f"every part that {INDEX} names",
                fix="Download the missing part.",
            )
    return places


def check_floats(tensors: Mapping[str, CheckpointTensor]) -> None:
    """Check that what is stored as it is has a floating type of 16 or 32 bits.

    Raises:
        CheckpointError: naming the tensor.
    """
    for key, tensor in tensors.items():
        if isinstance(tensor, StoredTensor) and tensor.dtype not in _EXPONENTS:
            raise _refused_type(tensor.file, key, _NAMES[tensor.dtype])


def _refused_type(file: Path, key: str, dtype: str) -> CheckpointError:
    return CheckpointError(
        f"{file.name}: {key}",
        got=dtype,
        expected=" or ".join(_FLOATS),
        fix="No quantization_config of config.json explains it: use the checkpoint before quantization.",
    )


def tensors_of(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of one safetensors file.

    Raises:
        CheckpointError: the file is damaged, or a tensor is of another type.
    """
    try:
        with safe_open(file, framework="numpy") as opened:
            keys = list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            str(file),
            got=f"a broken file ({error})",
            expected="a whole safetensors file",
            fix="It is truncated or damaged: download it again.",
        ) from error
    header, begin = _header(file)
    if header.get("__metadata__", {}).get("format") == "mlx":
        raise CheckpointError(
            f"{file.name}: format",
            got="'mlx'",
            expected="a file that transformers reads: MLX stores some tensors changed",
            fix="Take the checkpoint that it was converted from.",
        )
    for key in keys:
        entry = header[key]
        if _MASK.fullmatch(key) and len(entry["shape"]) in (0, 4):
            continue
        dtype = (_FLOATS | _PARTS).get(entry["dtype"])
        if dtype is None:
            raise _refused_type(file, key, entry["dtype"])
        # A single number without dimensions is a row of one.
        yield key, StoredTensor(file, dtype, tuple(entry["shape"]) or (1,), begin + entry["data_offsets"][0])


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a file that the library has accepted, and where its data begins."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return json.loads(opened.read(length)), 8 + length
