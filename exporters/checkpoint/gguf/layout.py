"""The layout of a GGUF file, checked before the package `gguf` reads it: that trusts every count and offset.

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

_HEADER_BYTES = 24
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes, by the number of the type
_STRING, _ARRAY = 8, 9
_MOST_ELEMENTS = 1 << 23  # of all arrays: ten times the tokens and merges of the largest vocabularies
_DEEPEST = 4
_MOST_DIMENSIONS = 4
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


def check_layout(path: Path, block_sizes: Mapping[Any, tuple[int, int]]) -> None:
    """Check that counts are what the file can hold, and that tensors lie within the data and apart.

    Args:
        path: the file, with a header that was checked.
        block_sizes: elements and bytes of a block, by the number of a type.

    Raises:
        LayoutError: naming what is impossible.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        walk = _Walk(content)
        tensors, fields = walk.number(_U64, at=8), walk.number(_U64, at=16)
        alignment = 32
        for _ in range(fields):
            key = walk.text()
            kind = walk.number(_U32)
            if key == _ALIGNMENT and kind == 4:
                alignment = walk.number(_U32, at=walk.position)
            walk.skip(kind, key)
        if alignment == 0 or alignment & (alignment - 1):
            raise LayoutError(f"{_ALIGNMENT} {alignment}, which is no power of two")
        places = [walk.tensor() for _ in range(tensors)]
        data = -(-walk.position // alignment) * alignment
        _check_places(places, len(content) - data, alignment, block_sizes)


def _check_places(
    places: list[TensorPlace], data_bytes: int, alignment: int, block_sizes: Mapping[Any, tuple[int, int]]
) -> None:
    end, before = 0, ""
    for place in sorted(places, key=lambda each: each.offset):
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
        found: int = form.unpack_from(self._content, start)[0]
        return found

    def text(self) -> str:
        length = self.number(_U64)
        self._check(self.position + length, f"a string of {length:,} bytes")
        start, self.position = self.position, self.position + length
        return self._content[start : self.position].decode("utf-8", "replace")

    def skip(self, kind: int, key: str, depth: int = 0) -> None:
        """Skip a value of this type."""
        if kind == _STRING:
            self.text()
        elif kind != _ARRAY:
            self._advance(self._scalar(kind, key), f"the value of {key}")
        elif depth == _DEEPEST:
            raise LayoutError(f"{key}: arrays nested more than {_DEEPEST} deep")
        else:
            inner, count = self.number(_U32), self.number(_U64)
            self._elements += count
            if self._elements > _MOST_ELEMENTS:
                raise LayoutError(f"{key}: arrays of {self._elements:,} elements, more than {_MOST_ELEMENTS:,}")
            if inner not in (_STRING, _ARRAY):
                self._advance(count * self._scalar(inner, key), f"{key}: an array of {count:,} elements")
                return
            for _ in range(count):
                self.skip(inner, key, depth + 1)

    def tensor(self) -> TensorPlace:
        """The next tensor's entry."""
        name, count = self.text(), self.number(_U32)
        if not 1 <= count <= _MOST_DIMENSIONS:
            raise LayoutError(f"the tensor {name} of {count} dimensions")
        dimensions = tuple(self.number(_U64) for _ in range(count))
        if 0 in dimensions:
            raise LayoutError(f"the tensor {name} of shape {list(dimensions[::-1])}")
        return TensorPlace(name, dimensions, self.number(_U32), self.number(_U64))

    @staticmethod
    def _scalar(kind: int, key: str) -> int:
        if kind not in _SCALARS:
            raise LayoutError(f"{key}: the unknown type {kind}")
        return _SCALARS[kind]

    def _advance(self, count: int, what: str) -> None:
        self._check(self.position + count, what)
        self.position += count

    def _check(self, end: int, what: str) -> None:
        if end > len(self._content):
            raise LayoutError(f"{what} beyond the end of the file")
