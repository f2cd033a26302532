"""Named arrays in one file, in the safetensors format.

The format: 8 bytes with the length of the header, little-endian; the header, a JSON object padded with spaces; the
arrays, one behind the other. Files are those of the package safetensors, which the runtime does not need for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.machine.decoding import DECODERS, convert

_METADATA = "__metadata__"
_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # as in the format's own reader
# In the order of the format's own writer, which puts the last ones first: then all arrays are aligned.
_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "U8": np.dtype("uint8"),
        "I8": np.dtype("int8"),
        "I16": np.dtype("<i2"),
        "U16": np.dtype("<u2"),
        "F16": np.dtype("<f2"),
        "I32": np.dtype("<i4"),
        "U32": np.dtype("<u4"),
        "F32": np.dtype("<f4"),
        "F64": np.dtype("<f8"),
        "I64": np.dtype("<i8"),
        "U64": np.dtype("<u8"),
    }
)
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ORDER = {dtype: -number for number, dtype in enumerate(_NAMES)}
_NOTHING: Mapping[str, str] = MappingProxyType({})


class TensorFileError(ValueError):
    """Content that is not a whole safetensors file; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The content of a file.

    Attributes:
        arrays: by name; they share the memory of the bytes that were read.
        metadata: texts by name.
    """

    arrays: Mapping[str, NDArray[Any]]
    metadata: Mapping[str, str]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def encode_tensors(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] = _NOTHING) -> bytes:
    """The content of a file.

    Args:
        arrays: of numbers, by name.
        metadata: texts by name.

    Raises:
        KeyError: an array of a type that the format does not have.
    """
    typed = {name: array.astype(array.dtype.newbyteorder("<"), "C", copy=False) for name, array in arrays.items()}
    ordered = sorted(typed.items(), key=lambda named: (_ORDER[named[1].dtype], named[0]))
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    parts, end = [b""], 0
    for name, array in ordered:
        start, end = end, end + array.nbytes
        header[name] = _Entry(_NAMES[array.dtype], list(array.shape), (start, end))
        parts.append(array.tobytes())
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _LENGTH_BYTES)
    parts[0] = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return b"".join(parts)


def decode_tensors(content: bytes | bytearray) -> TensorFile:
    """Read the content of a file. Arrays of a `bytearray` can be written to.

    Raises:
        TensorFileError: it is truncated, or is not such a file.
    """
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    if len(content) < _LENGTH_BYTES or length > min(MAX_HEADER_BYTES, len(content) - _LENGTH_BYTES):
        raise TensorFileError("the header is truncated")
    body = memoryview(content)[_LENGTH_BYTES + length :]
    try:
        header = DECODERS[dict[str, Any]].decode(memoryview(content)[_LENGTH_BYTES : _LENGTH_BYTES + length])
        metadata = convert(header.pop(_METADATA, {}), dict[str, str])
        entries = convert(header, dict[str, _Entry])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise TensorFileError(f"the header: {error}") from None
    end = 0
    for name, entry in sorted(entries.items(), key=lambda named: named[1].data_offsets):
        if entry.data_offsets[0] != end:
            raise TensorFileError(f"{name} does not begin where the array before it ends")
        end = _checked_end(name, entry)
    if end != len(body):
        raise TensorFileError(f"{len(body)} bytes of arrays, not {end}")
    return TensorFile({name: _array(name, entry, body) for name, entry in entries.items()}, metadata)


def _checked_end(name: str, entry: _Entry) -> int:
    """Where an array ends; its type and sizes must fit that."""
    start, end = entry.data_offsets
    if entry.dtype not in _DTYPES:
        raise TensorFileError(f"{name} has the unknown type {entry.dtype}")
    if min(entry.shape, default=0) < 0 or end - start != math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize:
        raise TensorFileError(f"{name} of shape {entry.shape} and type {entry.dtype} has {end - start} bytes")
    return end


def _array(name: str, entry: _Entry, body: memoryview) -> NDArray[Any]:
    start, end = entry.data_offsets
    try:
        return np.frombuffer(body[start:end], _DTYPES[entry.dtype]).reshape(entry.shape)
    except ValueError:  # more than 32 axes, or one of 2^63 beside one of 0
        raise TensorFileError(f"{name} has a shape of {len(entry.shape)} axes that no array has") from None
