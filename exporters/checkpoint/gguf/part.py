"""One file of GGUF's format: its metadata, and its tensors, which are mapped."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import CheckpointError
from exporters.checkpoint.gguf.layout import LayoutError, TensorPlace, read_layout

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_HEADER = struct.Struct("<4sIQQ")
_NUMBERS = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_MIN_ENTRY_BYTES = 13  # a key of one character, its type, and one byte
_TRUNCATED = "It is truncated or damaged: download it again."


@dataclass(frozen=True, slots=True)
class Block:
    """A tensor as the file stores it.

    Attributes:
        data: rows of quantized bytes `[rows, bytes]`, or of floats; mapped from the file.
        type: llama.cpp's name of the type, such as `Q4_K`.
        shape: dimensions, the slowest first: `[out, in]` for a matrix.
        file: where it is stored.
    """

    data: NDArray[Any]
    type: str
    shape: tuple[int, ...]
    file: Path


@dataclass(frozen=True, slots=True)
class Part:
    """An open file: a whole model, or one part of a split one.

    Attributes:
        path: the file.
        fields: its metadata, as it stands there.
        blocks: its tensors by name.
    """

    path: Path
    fields: Mapping[str, Any]
    blocks: Mapping[str, Block]


def is_gguf(path: Path) -> bool:
    """Whether a file starts with GGUF's magic number."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def open_part(path: Path) -> Part:
    """Read the metadata and map the tensors of one file.

    Raises:
        CheckpointError: the file is truncated, damaged, of another version or byte order, or `gguf` is missing.
    """
    _check_header(path)
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        raise CheckpointError(
            str(path),
            got="a GGUF file, but no package gguf",
            expected="the package gguf to read it",
            fix='Install it: pip install "edgekv[export]".',
        ) from None
    try:
        layout = read_layout(path, GGML_QUANT_SIZES)
    except LayoutError as error:
        raise CheckpointError(str(path), got=error, expected="a layout that can be", fix=_TRUNCATED) from None
    except (ValueError, OverflowError, MemoryError) as error:
        raise CheckpointError(
            str(path), got=f"a broken file ({error})", expected="a whole GGUF file", fix=_TRUNCATED
        ) from None
    if not layout.places:  # a vocabulary alone; its file may end before the place of data
        return Part(path, layout.fields, {})
    data = np.memmap(path, np.uint8, "r", layout.start).view(np.ndarray)
    blocks = {}
    for place in layout.places:
        kind = GGMLQuantizationType(place.type)
        blocks[place.name] = _block(path, data, place, kind.name, GGML_QUANT_SIZES[kind])
    return Part(path, layout.fields, blocks)


def _block(path: Path, data: NDArray[np.uint8], place: TensorPlace, kind: str, block: tuple[int, int]) -> Block:
    """A tensor; `block` has the elements and the bytes of a block of its type."""
    shape, (elements, block_bytes) = place.dimensions[::-1], block
    rows = *shape[:-1], shape[-1] // elements * block_bytes
    content = data[place.offset : place.offset + math.prod(rows)]
    return Block(
        content.view(_NUMBERS[kind]).reshape(shape) if kind in _NUMBERS else content.reshape(rows), kind, shape, path
    )


def _check_header(path: Path) -> None:
    """Reject files that are not GGUF, and counts that exceed the file's length, before anything is parsed."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or header[:4] != MAGIC:
        raise CheckpointError(str(path), got="no GGUF header", expected="a GGUF file", fix=_TRUNCATED)
    _, version, tensors, keys = _HEADER.unpack(header)
    if version not in _VERSIONS:
        big_endian = version >> 24 in _VERSIONS
        raise CheckpointError(
            str(path),
            got="a big-endian file" if big_endian else f"version {version}",
            expected="version 2 or 3, little-endian",
            fix="Convert the model again with a current llama.cpp.",
        )
    if (tensors + keys) * _MIN_ENTRY_BYTES > path.stat().st_size:
        raise CheckpointError(
            str(path),
            got=f"{tensors:,} tensors and {keys:,} fields in {path.stat().st_size:,} bytes",
            expected="counts that the file can hold",
            fix=_TRUNCATED,
        )
