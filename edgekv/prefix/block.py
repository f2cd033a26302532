"""One block, in memory and as a file: rows of some tokens in one group of layers, or the states after them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.prefix.keys import Keys, Link
from edgekv.prefix.retention import DEFAULT_PRIORITY
from edgekv.tensor_file import TensorFileError, decode_tensors, encode_tensors

FORMAT = "edgekv-prefix-2"
SNAPSHOT = -1
ROWS = "rows"

Arrays = Mapping[str, NDArray[Any]]
BlockId = tuple[bytes, int]


@dataclass(slots=True, eq=False)
class Block:
    """A block in memory.

    Attributes:
        link: its key, its parent and its own tokens.
        part: number of the group of layers whose rows it has; `SNAPSHOT` for the states after its last token.
        chained: whether it is of use only with the blocks before it, as rows of full attention are.
        arrays: `rows`, `[tensors, tokens, D]`; or the named arrays of a snapshot.
        priority: 0 to 100.
        expires_ms: when the priority returns to the default; None for never.
        used: last use: ns since the epoch, strictly increasing. Parents are touched after their children.
        is_saved: whether it has been written to the folder, or read from it.
    """

    link: Link
    part: int
    chained: bool
    arrays: Arrays
    priority: int = DEFAULT_PRIORITY
    expires_ms: int | None = None
    used: int = 0
    is_saved: bool = False

    @property
    def id(self) -> BlockId:
        """Its name, in memory and on disk."""
        return self.link.key, self.part

    @property
    def parent(self) -> BlockId:
        """The block that it follows."""
        return self.link.parent, self.part

    @property
    def size_bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def lasting_priority(self) -> int:
        """The priority on disk: one that expires is not visible to other processes."""
        return self.priority if self.expires_ms is None else DEFAULT_PRIORITY


def encode_block(id: BlockId, arrays: Arrays, keys: Keys) -> bytes:
    """The content of a block's file."""
    return encode_tensors(arrays, {"format": FORMAT, "checksum": _checksum(id, arrays, keys).hex()})


def decode_block(id: BlockId, content: bytes, keys: Keys) -> Arrays | None:
    """The arrays of a block, which share the memory of `content`.

    None if the file is truncated, changed, of another block, or was written with another secret.
    """
    try:
        file = decode_tensors(content)
    except TensorFileError:
        return None
    wanted = {"format": FORMAT, "checksum": _checksum(id, file.arrays, keys).hex()}
    return file.arrays if file.metadata == wanted else None


def _checksum(id: BlockId, arrays: Arrays, keys: Keys) -> bytes:
    key, part = id
    parts: list[bytes | memoryview] = [FORMAT.encode(), key, str(part).encode()]
    for name, array in sorted(arrays.items()):
        parts += [
            repr((name, array.dtype.str, array.shape)).encode(),
            np.ascontiguousarray(array).reshape(-1).data.cast("B"),
        ]
    return keys.digest(b"checksum", *parts)
