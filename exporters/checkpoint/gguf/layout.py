"""The metadata of a GGUF file, and where its tensors are, read with a check of every count and offset.

The package `gguf` trusts them, and takes seconds for the strings of a vocabulary: it makes an array of each.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes the format. All numbers are little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_HEADER_BYTES = 24
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_NAMES = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_SCALARS = {kind: np.dtype(name) for kind, name in _NAMES.items()}  # by the number of the type
_WHOLE_NUMBER = 4  # uint32
_STRING, _ARRAY = 8, 9
_MAX_ELEMENTS = 1 << 23  # of all arrays: ten times the tokens and merges of the largest vocabularies
_DEEPEST = 4
_MAX_DIMENSIONS = 4
_ALIGNMENT = "general.alignment"


class LayoutError(ValueError):
    """What a file says of itself is impossible."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor is stored.

    Attributes:
        name: of the tensor.
        dimensions: the fastest first.
        type: number of its type.
        offset: of its first byte from the beginning of the data.
    """

    name: str
    dimensions: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What a file says of itself.

    Attributes:
        fields: its metadata: numbers, texts, and lists of them; a list of lists is a tuple, which no reader accepts.
        places: of its tensors, in the order of the file.
        start: of the data, in bytes from the beginning of the file.
    """

    fields: Mapping[str, Any]
    places: list[TensorPlace]
    start: int


def read_layout(path: Path, block_sizes: Mapping[Any, tuple[int, int]]) -> Layout:
    """Read the metadata; counts are what the file can hold, and tensors lie within the data and apart.

    Args:
        path: the file, with a header that was checked.
        block_sizes: elements and bytes of a block, by the number of a type.

    Raises:
        LayoutError: naming what is impossible.
        UnicodeDecodeError: a text is not UTF-8.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        walk = _Walk(content)
        tensors, count = walk.number(_U64, at=8), walk.number(_U64, at=16)
        fields: dict[str, Any] = {}
        for _ in range(count):
            key = walk.text()
            kind = walk.number(_U32)
            if key in fields:
                raise LayoutError(f"the field {key} twice")
            if key == _ALIGNMENT and kind != _WHOLE_NUMBER:
                raise LayoutError(f"{_ALIGNMENT} of type {kind}")
            fields[key] = walk.value(kind, key)
        alignment = fields.get(_ALIGNMENT, 32)
        if alignment == 0 or alignment & (alignment - 1):
            raise LayoutError(f"{_ALIGNMENT} {alignment}, which is no power of two")
        places = [walk.tensor() for _ in range(tensors)]
        data = -(-walk.position // alignment) * alignment
        _check_places(places, len(content) - data, alignment, block_sizes)
        return Layout(fields, places, data)


def _check_places(
    places: list[TensorPlace], data_bytes: int, alignment: int, block_sizes: Mapping[Any, tuple[int, int]]
) -> None:
    end, before = 0, ""
    if len({place.name for place in places}) < len(places):
        raise LayoutError("two tensors of one name")
    for place in sorted(places, key=lambda place: place.offset):
        if place.type not in block_sizes:
            raise LayoutError(f"the tensor {place.name} of the unknown type {place.type}")
        elements, block_bytes = block_sizes[place.type]
        if place.dimensions[0] % elements:
            raise LayoutError(f"the tensor {place.name} with rows of {place.dimensions[0]}, no multiple of {elements}")
        size = math.prod(place.dimensions) // elements * block_bytes
        if place.offset % alignment:
            raise LayoutError(f"the tensor {place.name} at {place.offset}, no multiple of {alignment}")
        if place.offset + size > data_bytes:
            raise LayoutError(f"the tensor {place.name} up to byte {place.offset + size} of {max(data_bytes, 0)}")
        if place.offset < end:
            raise LayoutError(f"the tensors {before} and {place.name} in the same bytes")
        end, before = place.offset + size, place.name


class _Walk:
    """Reads the fields in front of the data one after the other."""

    def __init__(self, content: mmap.mmap) -> None:
        self.position = _HEADER_BYTES
        self._content = content
        self._elements = 0

    def number(self, form: struct.Struct, *, at: int | None = None) -> int:
        """The next number, or the one at a place."""
        start = self.position if at is None else at
        self._check(start + form.size, "a number")
        if at is None:
            self.position += form.size
        value: int = form.unpack_from(self._content, start)[0]
        return value

    def text(self) -> str:
        length = self.number(_U64)
        self._check(self.position + length, f"a string of {length:,} bytes")
        start, self.position = self.position, self.position + length
        return self._content[start : self.position].decode()

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        """The next value, of this type."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self._numbers(kind, 1, f"the value of {key}", key)[0]
        if depth == _DEEPEST:
            raise LayoutError(f"{key}: arrays nested more than {_DEEPEST} deep")
        inner, count = self.number(_U32), self.number(_U64)
        self._elements += count
        if self._elements > _MAX_ELEMENTS:
            raise LayoutError(f"{key}: arrays of {self._elements:,} elements, more than {_MAX_ELEMENTS:,}")
        if inner == _STRING:
            return [self.text() for _ in range(count)]
        if inner == _ARRAY:
            return tuple(self.value(inner, key, depth + 1) for _ in range(count))
        return self._numbers(inner, count, f"{key}: an array of {count:,} elements", key)

    def tensor(self) -> TensorPlace:
        """The next tensor's entry."""
        name, count = self.text(), self.number(_U32)
        if not 1 <= count <= _MAX_DIMENSIONS:
            raise LayoutError(f"the tensor {name} of {count} dimensions")
        dimensions = tuple(self.number(_U64) for _ in range(count))
        if 0 in dimensions:
            raise LayoutError(f"the tensor {name} of shape {list(dimensions[::-1])}")
        return TensorPlace(name, dimensions, self.number(_U32), self.number(_U64))

    def _numbers(self, kind: int, count: int, what: str, key: str) -> list[Any]:
        if kind not in _SCALARS:
            raise LayoutError(f"{key}: the unknown type {kind}")
        dtype = _SCALARS[kind]
        self._check(self.position + count * dtype.itemsize, what)
        start, self.position = self.position, self.position + count * dtype.itemsize
        values: list[Any] = np.frombuffer(self._content[start : self.position], dtype).tolist()
        return values

    def _check(self, end: int, what: str) -> None:
        if end > len(self._content):
            raise LayoutError(f"{what} beyond the end of the file")
