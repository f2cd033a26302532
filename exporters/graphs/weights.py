"""The integer weights of a bundle: quantized once, stored once, shared by all of its graphs.

Each shard is a safetensors file; graphs point into it as ONNX external data, by offset and length. Integers of 4 bits
are stored in pairs as bytes, since safetensors has no such type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import onnx
from numpy.typing import DTypeLike, NDArray

from edgekv.bundle.weights import Extent, MatrixPlace, TensorPlace, WeightPlaces
from edgekv.spec import DecoderSpec, head_width, views
from edgekv.spec.tensors import (
    DELTA_RATES,
    EMBEDDING,
    EMBEDDING_COLUMNS,
    EMBEDDING_STEPS,
    HEAD,
    LAYER_INPUTS,
    norms_of_residual,
    part_name,
    table_key,
)
from exporters.checkpoint.columns import blocks_of_rows
from exporters.quantize.matrices import QuantizedMatrices
from exporters.quantize.recipe import Recipe
from exporters.quantize.reference import Floats
from exporters.quantize.table import LayerTable, Table
from quant import WEIGHT_TYPES, Encoding, WeightDtype, pack_int4

_ONNX_TYPES = {
    "int4": onnx.TensorProto.INT4,
    "int8": onnx.TensorProto.INT8,
    "uint8": onnx.TensorProto.UINT8,
    "uint16": onnx.TensorProto.UINT16,
    "float32": onnx.TensorProto.FLOAT,
}

_DTYPES = {"float32": "F32", "uint16": "U16", "int8": "I8", "uint8": "U8"}  # of safetensors, in its library's order
_ALIGNMENT = 8

SIXTEEN_BITS = ".uint16"
TABLE = "embedding.table"


_NORM = Encoding("u16", 1 / 32768, 0)

Place = TypeVar("Place", MatrixPlace, TensorPlace)


class MatrixNames(NamedTuple):
    """Names of the tensors of a stored matrix, or of one head of it.

    Attributes:
        integers: `[in, out]`.
        scales: `[out]`.
        block_scales: `[in / block, out]`, if it has blocks.
        dtype: integer type.
        columns: number of outputs.
        blocks: of a column; 0 if it has none.
        by_outputs: whether the integers are `[out, in]`.
    """

    integers: str
    scales: str
    block_scales: str | None
    dtype: WeightDtype
    columns: int
    blocks: int
    by_outputs: bool = False


class StoredWeights(Protocol):
    """The weights of a graph under construction, under the names that its initializers have."""

    def matrix(self, key: str, *, head: int | None, gain: float) -> MatrixNames:
        """A matrix, or one head's columns of it; the scales are to include the gain."""

    def tensor(self, key: str, *, head: int | None = None, tap: int | None = None) -> tuple[str, Encoding]:
        """Name and encoding of a tensor, a head's part of a bias, or a tap of kernels, in 16 bits with one scale."""

    @property
    def has_columns(self) -> bool:
        """Whether columns of the table of embeddings have factors."""

    def table(self) -> str:
        """The integers of the table of embeddings; a head that shares them has another name for the same bytes.

        The HTP compiler gives a name one encoding: here all rows have the step 1, in the head each has its own.
        """

    def initializer(self, name: str) -> onnx.TensorProto:
        """The stored tensor of this name as an ONNX initializer that points into its file."""


class PlacedWeights:
    """The weights of a bundle, from their places in its manifest; `StoredWeights`."""

    def __init__(self, places: WeightPlaces) -> None:
        self._places = places
        self._initializers: dict[str, onnx.TensorProto] = {}

    def matrix(self, key: str, *, head: int | None, gain: float) -> MatrixNames:
        place = self._places.matrices[key]
        names = _names(key, place, head)
        if names[0] not in self._initializers:
            self._initializers |= _matrix_initializers(key, place)
        return MatrixNames(*names, place.dtype, place.width, place.blocks, place.by_outputs)

    def tensor(self, key: str, *, head: int | None = None, tap: int | None = None) -> tuple[str, Encoding]:
        key = part_name(key, head, tap)
        place = self._places.tensors[key]
        self._initializers[key + SIXTEEN_BITS] = _tensor_initializer(key, place)
        return key + SIXTEEN_BITS, place.encoding

    @property
    def has_columns(self) -> bool:
        return EMBEDDING_COLUMNS in self._places.tensors

    def table(self) -> str:
        key = EMBEDDING if EMBEDDING in self._places.matrices else HEAD
        self._initializers[TABLE] = _table_initializer(self._places.matrices[key])
        return TABLE

    def initializer(self, name: str) -> onnx.TensorProto:
        return self._initializers[name]


class AskedWeights(PlacedWeights):
    """Notes what graphs ask for, in the types of a recipe; nothing of it is anywhere.

    Attributes:
        places: of all that was asked for.
    """

    def __init__(self, spec: DecoderSpec, recipe: Recipe) -> None:
        super().__init__(WeightPlaces())
        self._spec = spec
        self._recipe = recipe
        read = (view for view in views(spec) if view.name != EMBEDDING and (view.is_multiplied or len(view.shape) != 2))
        self._shapes = {view.name: view.shape for view in read}
        for name in norms_of_residual(spec) & self._shapes.keys():
            self._shapes[name] = (self._shapes[name][0] + spec.copies,)

    @property
    def places(self) -> WeightPlaces:
        return self._places

    def matrix(self, key: str, *, head: int | None, gain: float) -> MatrixNames:
        if key not in self._places.matrices:
            outputs, inputs = self._shapes[key]
            dtype = self._recipe.rule(key).dtype
            heads = 1 if head is None else outputs // head_width(self._spec, key)
            place = MatrixPlace(
                file="",
                dtype=dtype,
                rows=inputs,
                columns=outputs,
                heads=heads,
                integers=0,
                scales=0,
                block_scales=None if WEIGHT_TYPES[dtype].block is None else 0,
            )
            self._places.matrices[key] = self._placed(key, place)
        return super().matrix(key, head=head, gain=gain)

    def tensor(self, key: str, *, head: int | None = None, tap: int | None = None) -> tuple[str, Encoding]:
        name = part_name(key, head, tap)
        if name not in self._places.tensors:
            shape = self._shapes[key]
            if tap is not None:
                shape = shape[:1]
            elif head is not None:
                shape = (1 if key.endswith(DELTA_RATES) else head_width(self._spec, key),)
            place = TensorPlace(file="", shape=shape, offset=0, encoding=_NORM)
            self._places.tensors[name] = self._placed(name, place)
        return super().tensor(key, head=head, tap=tap)

    def _placed(self, name: str, place: Place) -> Place:
        """The place with where it is."""
        return place


class ShardWriter(PlacedWeights):
    """Collects the weights that a graph under construction asks for, and writes them to a file.

    Initializers are known once their file is written.

    Attributes:
        places: of everything that was asked for; of what is not written yet without its file and offsets.
    """

    def __init__(
        self, tensor: Callable[[str], Floats], head_width: Callable[[str], int], matrices: QuantizedMatrices
    ) -> None:
        """Args: tensor: reads one by name. head_width: of a projection's heads. matrices: by name."""
        super().__init__(WeightPlaces())
        self._tensor = tensor
        self._head_width = head_width
        self._matrices = matrices
        self._pending: dict[str, NDArray[Any] | TensorStream] = {}

    @property
    def places(self) -> WeightPlaces:
        return self._places

    @property
    def is_pending(self) -> bool:
        """Whether something was asked for that is not written."""
        return bool(self._pending)

    def put_table(self, table: Table) -> None:
        """Keep the table of embeddings, and the steps of its scales, for the next file.

        A head that shares the rows has rounded them.
        """
        spec = table.tensors.spec
        key = table_key(spec)
        place = self._places.matrices[key] = _table_place(spec.vocab, spec.hidden)
        integers, scales, _ = _names(key, place, None)
        blocks = partial(_blocks_of_rows, self._matrices[key].integers) if spec.shares_vocabulary else table.blocks
        self._pending[integers] = TensorStream(np.int8, (spec.vocab, spec.hidden), blocks)
        self._pending[scales] = table.scales
        self._put_tensor(EMBEDDING_STEPS, table.encoding, table.steps)
        if table.columns is not None:
            encoding = table.column_encoding
            self._put_tensor(EMBEDDING_COLUMNS, encoding, encoding.quantize(table.columns))

    def put_layer_table(self, table: LayerTable, path: Path) -> tuple[float, float]:
        """Write the table of what layers read of tokens to a file of its own.

        Returns:
            The minimum and maximum element, 0 or beyond.
        """
        vocab, width = table.shape
        scales, reach = list[NDArray[np.float32]](), [0.0, 0.0]

        def integers() -> Iterator[NDArray[np.int8]]:
            for rows, steps in table.blocks():
                scales.append(steps)
                ends = rows.min(axis=1) * steps, rows.max(axis=1) * steps
                reach[:] = min(reach[0], float(ends[0].min())), max(reach[1], float(ends[1].max()))
                yield rows

        place = self._places.matrices[LAYER_INPUTS] = _table_place(vocab, width)
        name, scale_name, _ = _names(LAYER_INPUTS, place, None)
        self._pending[name] = TensorStream(np.int8, (vocab, width), integers)
        self._pending[scale_name] = TensorStream(np.float32, (vocab,), lambda: scales)
        self.write(path)
        return reach[0], reach[1]

    def matrix(self, key: str, *, head: int | None, gain: float) -> MatrixNames:
        """Where a matrix, or one head's columns of it, will be stored.

        Raises:
            ValueError: it is stored by head, and wanted whole, or the other way round.
        """
        if key not in self._places.matrices:
            self._put_matrix(key, head is not None, gain)
        place = self._places.matrices[key]
        if place.width != (place.columns if head is None else self._head_width(key)):
            raise ValueError(f"{key}: got {place.heads} heads of {place.width}; expected the same use in all graphs")
        names = _names(key, place, head)
        return MatrixNames(*names, place.dtype, place.width, place.blocks, place.by_outputs)

    def tensor(self, key: str, *, head: int | None = None, tap: int | None = None) -> tuple[str, Encoding]:
        name = part_name(key, head, tap)
        if name not in self._places.tensors:
            values = self._tensor(key)
            if tap is not None:
                values = np.ascontiguousarray(values[:, 0, tap])
            if head is not None:
                width = 1 if key.endswith(DELTA_RATES) else self._head_width(key)
                values = values[head * width : (head + 1) * width]
            encoding = Encoding.asymmetric(float(values.min()), float(values.max()), "u16")
            self._put_tensor(name, encoding, encoding.quantize(values))
        return name + SIXTEEN_BITS, self._places.tensors[name].encoding

    def write(self, path: Path) -> None:
        """Write what is pending to a safetensors file and free its values."""
        extents = write_shard(path, self._pending)
        self._pending.clear()
        for key, matrix in self._places.matrices.items():
            if not matrix.file:
                integers, scales, block_scales = _names(key, matrix, None)
                self._places.matrices[key] = written = msgspec.structs.replace(
                    matrix,
                    file=path.name,
                    integers=extents[integers].offset,
                    scales=extents[scales].offset,
                    block_scales=None if block_scales is None else extents[block_scales].offset,
                )
                self._initializers |= _matrix_initializers(key, written)
        for name, tensor in self._places.tensors.items():
            if not tensor.file:
                stored = name + SIXTEEN_BITS
                placed = msgspec.structs.replace(tensor, file=path.name, offset=extents[stored].offset)
                self._places.tensors[name] = placed
                self._initializers[stored] = _tensor_initializer(name, placed)

    def _put_tensor(self, name: str, encoding: Encoding, integers: NDArray[Any]) -> None:
        self._pending[name + SIXTEEN_BITS] = integers
        self._places.tensors[name] = TensorPlace(file="", shape=integers.shape, offset=0, encoding=encoding)

    def _put_matrix(self, key: str, by_head: bool, gain: float) -> None:
        """Keep a matrix for the next file."""
        weight = self._matrices[key]
        grid, (rows, columns) = weight.grid, weight.integers.shape
        heads = columns // self._head_width(key) if by_head else 1
        place = self._places.matrices[key] = MatrixPlace(
            file="",
            dtype=grid.dtype,
            rows=rows,
            columns=columns,
            heads=heads,
            integers=0,
            scales=0,
            block_scales=None if grid.block_scales is None else 0,
        )
        integers, scales, block_scales = _names(key, place, None)
        stored = _head_by_head(weight.integers, heads)
        self._pending[integers] = pack_int4(stored) if grid.type.is_packed else stored
        self._pending[scales] = grid.scales * np.float32(gain)
        if block_scales is not None and grid.block_scales is not None:
            self._pending[block_scales] = _head_by_head(grid.block_scales, heads)


def _blocks_of_rows(integers: NDArray[np.int8]) -> Iterator[NDArray[np.int8]]:
    """A matrix `[in, out]` as `[out, in]`, some rows at a time."""
    return (np.ascontiguousarray(integers[:, rows].T) for rows in blocks_of_rows(integers.shape[1]))


def _table_place(vocab: int, width: int) -> MatrixPlace:
    """The place of a table `[V, width]` that is not written yet."""
    return MatrixPlace(file="", dtype="int8", rows=width, columns=vocab, heads=1, integers=0, scales=0, by_outputs=True)


def _matrix_initializers(key: str, place: MatrixPlace) -> dict[str, onnx.TensorProto]:
    """The tensors of each head of a matrix, by name."""
    initializers = {}
    for head in range(place.heads):
        whole = (place.columns, place.rows) if place.by_outputs else (place.rows, place.width)
        shapes = whole, (place.width,), (place.blocks, place.width)
        dtypes = WEIGHT_TYPES[place.dtype].stored, "float32", "uint8"
        parts = zip(_names(key, place, head), dtypes, shapes, place.head_extents(head), strict=False)
        for name, dtype, shape, extent in parts:
            assert name is not None, "blocks have scales"
            initializers[name] = _initializer(name, dtype, shape, place.file, extent)
    return initializers


def _table_initializer(place: MatrixPlace) -> onnx.TensorProto:
    return _initializer(TABLE, "int8", (place.columns, place.rows), place.file, place.extents[0])


def _tensor_initializer(key: str, place: TensorPlace) -> onnx.TensorProto:
    return _initializer(key + SIXTEEN_BITS, "uint16", place.shape, place.file, place.extent)


def _initializer(name: str, dtype: str, shape: tuple[int, ...], file: str, extent: Extent) -> onnx.TensorProto:
    proto = onnx.TensorProto(
        name=name, data_type=_ONNX_TYPES[dtype], dims=shape, data_location=onnx.TensorProto.EXTERNAL
    )
    for field, value in (("location", file), ("offset", extent.offset), ("length", extent.bytes)):
        proto.external_data.add(key=field, value=str(value))
    return proto


def _names(key: str, place: MatrixPlace, head: int | None) -> tuple[str, str, str | None]:
    """Names of the integers, scales and scales of blocks of a matrix, or of one head of several."""
    part = key if head is None or place.heads == 1 else f"{key}.h{head}"
    block_scales = None if place.block_scales is None else part + ".block_scale"
    return f"{part}.{WEIGHT_TYPES[place.dtype].stored}", part + ".scale", block_scales


def _head_by_head(matrix: NDArray[Any], heads: int) -> NDArray[Any]:
    """`[rows, out]` as `[heads, rows, out / heads]`; as it is if there is one head."""
    if heads == 1:
        return np.ascontiguousarray(matrix)
    return np.ascontiguousarray(matrix.reshape(len(matrix), heads, -1).transpose(1, 0, 2))


@dataclass(frozen=True, slots=True)
class TensorStream:
    """A tensor that is computed while it is written.

    Attributes:
        dtype: of its elements.
        shape: its dimensions.
        blocks: its elements in order, in chunks.
    """

    dtype: DTypeLike
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[NDArray[Any]]]


def write_shard(path: Path, tensors: Mapping[str, NDArray[Any] | TensorStream]) -> dict[str, Extent]:
    """Write the tensors, sorted by descending type width, then by name; return the place of each.

    The library's writer needs memory for everything twice. The bytes are the same.

    They are computed in the opposite order: scales may follow from the integers behind them.

    Raises:
        ValueError: the blocks of a streamed tensor do not fill its shape.
    """
    ranks = list(_DTYPES)
    names = sorted(tensors, key=lambda name: (ranks.index(np.dtype(tensors[name].dtype).name), name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        dtype = np.dtype(tensor.dtype)
        begin, end = end, end + dtype.itemsize * int(np.prod(tensor.shape, dtype=np.int64))
        header[name] = {"dtype": _DTYPES[dtype.name], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    data = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in reversed(names):
            tensor = tensors[name]
            file.seek(data + header[name]["data_offsets"][0])
            for block in tensor.blocks() if isinstance(tensor, TensorStream) else (tensor,):
                file.write(np.ascontiguousarray(block, tensor.dtype).data)
            if file.tell() != data + header[name]["data_offsets"][1]:
                raise ValueError(f"{name}: got blocks of another size; expected shape {tensor.shape}")
    extents = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: Extent(data + begin, end - begin) for name, (begin, end) in extents.items()}
