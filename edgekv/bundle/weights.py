"""Where the weights of a bundle are: the records in its manifest, and what is read from there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from edgekv.bundle.records import Count, Record
from quant import DTYPES, WEIGHT_TYPES, Encoding, Grid, QuantizedWeight, WeightDtype, unpack_int4

_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]


class Extent(NamedTuple):
    """Consecutive bytes of a file."""

    offset: int
    bytes: int


class MatrixPlace(Record, frozen=True):
    """Where a matrix of integers is stored, `[in, out]`.

    A matrix that graphs multiply head by head is stored head by head: `[heads, in, out / heads]`. The table of
    embeddings, which can be the head's matrix too, is stored row by row: `[out, in]`.

    Attributes:
        file: a safetensors file of the bundle.
        dtype: integer type.
        rows: inputs.
        columns: outputs, of all heads.
        heads: into which its outputs are divided; 1 if they are not.
        integers: offset of the integers in the file, bytes; those of 4 bits are stored in pairs, the first one low.
        scales: offset of the scales, float32 `[out]`.
        by_outputs: whether it is stored `[out, in]`.
        block_scales: offset of the scales of blocks, uint8 `[heads, in / block, out / heads]`; null without blocks.
    """

    file: str
    dtype: WeightDtype
    rows: _Size
    columns: _Size
    heads: _Size
    integers: Count
    scales: Count
    block_scales: Count | None = None
    by_outputs: bool = False

    def __post_init__(self) -> None:
        kind = WEIGHT_TYPES[self.dtype]
        if self.columns % self.heads:
            raise ValueError(f"heads: got {self.heads}; expected a divisor of {self.columns} columns")
        if (kind.block is None) != (self.block_scales is None):
            raise ValueError(f"block_scales: expected {'none' if kind.block is None else 'some'} with {self.dtype}")
        if self.by_outputs and (self.dtype != "int8" or self.heads > 1):
            raise ValueError(f"by_outputs: got {self.dtype} in {self.heads} heads; expected int8 in one")
        if kind.block is not None and self.rows % kind.block:
            raise ValueError(f"rows: got {self.rows}; expected a multiple of {kind.block} with {self.dtype}")
        if kind.is_packed and self.heads > 1 and self.rows * self.width % 2:
            raise ValueError(f"rows: got {self.rows} of {self.width} integers a head; expected an even number")

    @property
    def width(self) -> int:
        """Outputs of a head."""
        return self.columns // self.heads

    @property
    def blocks(self) -> int:
        """Blocks of a column."""
        block = WEIGHT_TYPES[self.dtype].block
        return 0 if block is None else self.rows // block

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The bytes of the integers, the scales and, if there are any, the scales of blocks."""
        bits = WEIGHT_TYPES[self.dtype].bits
        extents = [
            Extent(self.integers, -(-self.rows * self.columns * bits // 8)),
            Extent(self.scales, 4 * self.columns),
        ]
        if self.block_scales is not None:
            extents.append(Extent(self.block_scales, self.blocks * self.columns))
        return tuple(extents)

    def head_extents(self, head: int) -> tuple[Extent, ...]:
        """The same of one head."""
        sizes = (Extent(extent.offset, extent.bytes // self.heads) for extent in self.extents)
        return tuple(Extent(extent.offset + head * extent.bytes, extent.bytes) for extent in sizes)


class TensorPlace(Record, frozen=True):
    """Where a tensor of 16-bit integers is stored: a norm, a bias, or the steps of the embeddings' scales.

    Attributes:
        file: a safetensors file of the bundle.
        shape: its dimensions.
        offset: of its integers in the file, bytes.
        encoding: of its integers.
    """

    file: str
    shape: tuple[_Size, ...]
    offset: Count
    encoding: Encoding

    @property
    def extent(self) -> Extent:
        """Its bytes."""
        size = DTYPES[self.encoding.dtype].itemsize
        for dimension in self.shape:
            size *= dimension
        return Extent(self.offset, size)


class WeightPlaces(Record, frozen=True):
    """The place of every weight of a bundle's ONNX graphs.

    Attributes:
        matrices: that activations are multiplied by, by their names in the checkpoint.
        tensors: all others by their names; biases of matrices that are stored by head have `.hN` behind them.
    """

    matrices: dict[str, MatrixPlace] = msgspec.field(default_factory=dict)
    tensors: dict[str, TensorPlace] = msgspec.field(default_factory=dict)

    def extents(self) -> Iterator[tuple[str, str, Extent]]:
        """Name, file and bytes of everything that is stored."""
        for name, matrix in self.matrices.items():
            for extent in matrix.extents:
                yield name, matrix.file, extent
        for name, tensor in self.tensors.items():
            yield name, tensor.file, tensor.extent

    @property
    def files(self) -> list[str]:
        """The files in which anything is stored, sorted."""
        return sorted({file for _, file, _ in self.extents()})

    @property
    def total_bytes(self) -> int:
        """Size of all weights, without the headers of files."""
        return sum(extent.bytes for _, _, extent in self.extents())

    def bytes(self, key: str) -> int:
        """Size of a matrix, its scales included."""
        return sum(extent.bytes for extent in self.matrices[key].extents)


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """The table of embeddings, mapped: a step reads only the pages of its own rows.

    Attributes:
        integers: int8 `[V, hidden]`.
        scales: of the rows, float32 `[V]`.
        encoding: of the embeddings that graphs read.
        columns: factors of the columns, float32 `[hidden]`, and the encoding of integers times them; none without.
    """

    integers: NDArray[np.int8]
    scales: NDArray[np.float32]
    encoding: Encoding
    columns: tuple[NDArray[np.float32], Encoding] | None = None

    def rows(self, tokens: Sequence[int] | NDArray[np.int64] | slice) -> NDArray[Any]:
        """The embeddings of tokens as graphs read them, `[T, hidden]`."""
        at = tokens if isinstance(tokens, slice) else np.asarray(tokens, np.int64)
        rows = self.integers[at].astype(np.float32)
        if self.columns is not None:
            factors, scaled = self.columns
            rows = scaled.dequantize(scaled.quantize(rows * factors))
        return self.encoding.quantize(rows * self.scales[at, None])


class BundleWeights:
    """Reads weights from where a manifest says that they are. Files are mapped, and their pages read when needed."""

    def __init__(self, folder: Path, places: WeightPlaces) -> None:
        """Args: folder: of the bundle. places: checked by `read_manifest`, with files whose sizes are checked."""
        self._folder = folder
        self.places = places

    def matrix(self, key: str) -> QuantizedWeight:
        """A matrix, int8 `[in, out]`, and its scales, with the gains that the export folded into them."""
        place = self.places.matrices[key]
        integers, scales, *blocks = place.extents
        if WEIGHT_TYPES[place.dtype].is_packed:
            flat = unpack_int4(self._read(place.file, integers, np.uint8))[: place.rows * place.columns]
        else:
            flat = self._read(place.file, integers, np.int8)
        steps = [_by_columns(self._read(place.file, extent, np.uint8), place, place.blocks) for extent in blocks]
        grid = Grid(place.dtype, self._read(place.file, scales, np.float32), *steps)
        if place.by_outputs:
            return QuantizedWeight(flat.reshape(place.columns, place.rows).T, grid)
        return QuantizedWeight(_by_columns(flat, place, place.rows), grid)

    def tensor(self, name: str) -> NDArray[Any]:
        """The integers of a tensor, encoded as its place says."""
        place = self.places.tensors[name]
        return self._read(place.file, place.extent, DTYPES[place.encoding.dtype]).reshape(place.shape)

    def by_rows(self, key: str) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """The integers `[out, in]` of a matrix that is stored so, and its scales, mapped."""
        place = self.places.matrices[key]
        integers, scales = place.extents
        flat = self._read(place.file, integers, np.int8)
        return flat.reshape(place.columns, place.rows), self._read(place.file, scales, np.float32)

    def _read(self, file: str, extent: Extent, dtype: DTypeLike) -> NDArray[Any]:
        content: NDArray[Any] = self.files[file][extent.offset : extent.offset + extent.bytes].view(dtype)
        return content

    @cached_property
    def files(self) -> dict[str, NDArray[np.uint8]]:
        """The content of every file, mapped."""
        return {name: np.memmap(self._folder / name, np.uint8, "r") for name in self.places.files}


def _by_columns(flat: NDArray[Any], place: MatrixPlace, rows: int) -> NDArray[Any]:
    """What is stored head by head as one matrix `[rows, out]`."""
    by_head = flat.reshape(place.heads, rows, place.width)
    return by_head[0] if place.heads == 1 else by_head.transpose(1, 0, 2).reshape(rows, place.columns)
