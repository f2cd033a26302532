"""A GGUF file: typed access to its metadata and tensors."""

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
from exporters.checkpoint.gguf.layout import LayoutError, check_layout

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_HEADER = struct.Struct("<4sIQQ")
_LEAST_ENTRY_BYTES = 13  # a key of one character, its type, and one byte
_TRUNCATED = "It is truncated or damaged: download it again."


@dataclass(frozen=True, slots=True)
class Block:
    """A tensor as the file stores it.

    Attributes:
        data: rows of quantized bytes `[rows, bytes]`, or of floats; mapped from the file.
        type: llama.cpp's name of the type, such as `Q4_K`.
        shape: dimensions, the slowest first: `[out, in]` for a matrix.
    """

    data: NDArray[Any]
    type: str
    shape: tuple[int, ...]


def is_gguf(path: Path) -> bool:
    """Whether a file starts with GGUF's magic number."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


class GgufFile:
    """An open GGUF file.

    Attributes:
        path: the file.
        architecture: `general.architecture`, such as `llama`.
        blocks: every tensor by its name.
    """

    def __init__(self, path: Path) -> None:
        """Read the metadata and map the tensors.

        Raises:
            CheckpointError: the file is truncated, damaged, of another version or byte order, or `gguf` is missing.
        """
        self.path = path
        _check_header(path)
        try:
            from gguf import GGML_QUANT_SIZES, GGUFReader
        except ImportError:
            raise CheckpointError(
                str(path),
                got="a GGUF file, but no package gguf",
                expected="the package gguf to read it",
                fix='Install it: pip install "edgekv[export]".',
            ) from None
        try:
            check_layout(path, GGML_QUANT_SIZES)
            reader = GGUFReader(path)
            fields = {name: field.contents() for name, field in reader.fields.items()}
            blocks = {
                tensor.name: Block(tensor.data, tensor.tensor_type.name, tuple(int(n) for n in tensor.shape)[::-1])
                for tensor in reader.tensors
            }
        except LayoutError as error:
            raise CheckpointError(str(path), got=error, expected="a layout that can be", fix=_TRUNCATED) from None
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, struct.error) as error:
            raise CheckpointError(
                str(path), got=f"a broken file ({error})", expected="a whole GGUF file", fix=_TRUNCATED
            ) from None
        self._fields: Mapping[str, Any] = fields
        self.blocks: Mapping[str, Block] = blocks
        self.architecture = self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        return self._key(key) in self._fields

    def text(self, key: str, default: str | None = None) -> str:
        """A string of the metadata.

        Raises:
            CheckpointError: it is missing without a default, or of another type.
        """
        value = self._fields.get(self._key(key), default)
        if isinstance(value, str):
            return value
        raise self.refusal(key, "a string", value)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number of the metadata; float32 is read as its shortest decimal, 1e-05 rather than 9.99999974e-06.

        Raises:
            CheckpointError: it is missing without a default, or of another type.
        """
        value = self._fields.get(self._key(key), default)
        if isinstance(value, (int, float, np.integer, np.floating)) and math.isfinite(value):
            single = np.float32(value)
            return float(str(single)) if float(single) == value else float(value)
        raise self.refusal(key, "a number", value)

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of the metadata; for a list with one entry per layer, the entry that all layers share.

        Layers without heads, which have a 0, do not count.

        Raises:
            CheckpointError: it is missing without a default, of another type, or differs between layers.
        """
        value = self._fields.get(self._key(key), default)
        if isinstance(value, list) and len(shared := {each for each in value if each}) == 1:
            value = shared.pop()
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            return int(value)
        raise self.refusal(key, "a whole number", value)

    def sizes(self, key: str, layers: int) -> list[int]:
        """A whole number of the metadata for each layer, from a list or from one that all share.

        Raises:
            CheckpointError: it is missing, of another type, or a list of another length.
        """
        value = self._fields.get(self._key(key))
        if not isinstance(value, list):
            return [self.size(key)] * layers
        if len(value) == layers and all(isinstance(each, (int, np.integer)) for each in value):
            return [int(each) for each in value]
        raise self.refusal(key, f"a whole number for each of {layers} layers", value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false of the metadata.

        Raises:
            CheckpointError: it is of another type.
        """
        value = self._fields.get(self._key(key), default)
        if isinstance(value, (bool, np.bool_)):
            return bool(value)
        raise self.refusal(key, "true or false", value)

    def list(self, key: str) -> list[Any]:
        """A list of the metadata; empty if it is missing.

        Raises:
            CheckpointError: it is of another type.
        """
        value = self._fields.get(self._key(key), [])
        if isinstance(value, list):
            return value
        raise self.refusal(key, "a list", value)

    def refusal(self, key: str, expected: str, value: object) -> CheckpointError:
        """The error that refuses a metadata field."""
        got = "nothing" if value is None else repr(value)[:80]
        return CheckpointError(
            f"{self.path.name}: {self._key(key)}",
            got=got,
            expected=expected,
            fix="Convert the model again with a current llama.cpp, or start from its safetensors.",
        )

    def _key(self, key: str) -> str:
        """Keys that start with a dot belong to the architecture: `.block_count` is `llama.block_count`."""
        return f"{self.architecture}{key}" if key.startswith(".") else key


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
    if (tensors + keys) * _LEAST_ENTRY_BYTES > path.stat().st_size:
        raise CheckpointError(
            str(path),
            got=f"{tensors:,} tensors and {keys:,} fields in {path.stat().st_size:,} bytes",
            expected="counts that the file can hold",
            fix=_TRUNCATED,
        )
