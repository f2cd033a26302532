"""The file of one block: its arrays in the safetensors format, with a keyed checksum."""

from __future__ import annotations

import numpy as np

from edgekv.prefix.block import Arrays, BlockId
from edgekv.prefix.keys import Keys
from edgekv.tensor_file import TensorFileError, decode_tensors, encode_tensors

FORMAT = "edgekv-prefix-2"


class RejectedFileError(Exception):
    """A file that must not be used; the message gives the reason."""


def encode_block(id: BlockId, arrays: Arrays, keys: Keys) -> bytes:
    """The content of a block's file."""
    return encode_tensors(arrays, {"format": FORMAT, "checksum": _checksum(id, arrays, keys).hex()})


def decode_block(id: BlockId, content: bytes, keys: Keys) -> Arrays:
    """The arrays of a block, verified; they share the memory of `content`.

    Raises:
        RejectedFileError: the file is truncated, changed, of another block, or was written with another secret.
    """
    try:
        file = decode_tensors(content)
    except TensorFileError as error:
        raise RejectedFileError(str(error)) from None
    wanted = {"format": FORMAT, "checksum": _checksum(id, file.arrays, keys).hex()}
    if file.metadata != wanted:
        raise RejectedFileError("the format or the checksum differs")
    return file.arrays


def _checksum(id: BlockId, arrays: Arrays, keys: Keys) -> bytes:
    key, part = id
    parts: list[bytes | memoryview] = [FORMAT.encode(), key, str(part).encode()]
    for name, array in sorted(arrays.items()):
        parts += [
            repr((name, array.dtype.str, array.shape)).encode(),
            np.ascontiguousarray(array).reshape(-1).data.cast("B"),
        ]
    return keys.digest(b"checksum", *parts)
