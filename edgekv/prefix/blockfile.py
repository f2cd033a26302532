"""The file of one block: safetensors with a descriptive header and a keyed checksum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.prefix.keys import Keys, token_bytes
from edgekv.prefix.retention import MAX_PRIORITY
from edgekv.tensor_file import decode_tensors, encode_tensors

FORMAT = "edgekv-prefix-1"
SUFFIX = ".safetensors"
_ROWS, _TOKENS = "rows", "tokens"


class RejectedFileError(Exception):
    """A file that must not be used; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """The header of a block file.

    Attributes:
        fingerprint: hash of the store's fingerprint and layout.
        group: index of the group of layers.
        root: key of the salt.
        tokens: the sequence from its first token to the end of the block.
        priority: retention priority, 0 to 100.
    """

    fingerprint: bytes
    group: int
    root: bytes
    tokens: tuple[int, ...]
    priority: int

    def name(self, keys: Keys) -> str:
        """The file's name: a keyed hash that reveals neither salt nor tokens."""
        return f"{keys.sequence(self.root, token_bytes(self.tokens)).hex()}-g{self.group}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A block file as read, not yet verified.

    Attributes:
        record: its header.
        rows: `[tensors, tokens, D]`.
        checksum: over both.
    """

    record: BlockRecord
    rows: NDArray[Any]
    checksum: bytes

    def check(self, keys: Keys) -> None:
        """Reject a file that was written with other keys or was modified.

        Raises:
            RejectedFileError: the checksum differs.
        """
        if _checksum(self.record, self.rows, keys) != self.checksum:
            raise RejectedFileError("the checksum differs")


def encode(record: BlockRecord, rows: NDArray[Any], keys: Keys) -> bytes:
    """The content of a file for rows `[tensors, tokens_per_block, D]`."""
    metadata = {
        "format": FORMAT,
        "fingerprint": record.fingerprint.hex(),
        "group": str(record.group),
        "root": record.root.hex(),
        "priority": f"{record.priority:03d}",
        "checksum": _checksum(record, rows, keys).hex(),
    }
    return encode_tensors({_ROWS: rows, _TOKENS: np.array(record.tokens, np.int64)}, metadata)


def decode(data: bytes) -> BlockFile:
    """Read a file's content; arrays share its memory.

    Raises:
        RejectedFileError: it is truncated or not a block file.
    """
    try:
        held = decode_tensors(data)
        said = held.metadata
        if said.get("format") != FORMAT:
            raise RejectedFileError(f"the format is {said.get('format')}, not {FORMAT}")
        tokens, rows = held.arrays[_TOKENS], held.arrays[_ROWS]
        if tokens.dtype != np.int64 or tokens.ndim != 1 or len(held.arrays) != 2:
            raise RejectedFileError("the tensors are not those of a block")
        record = BlockRecord(
            bytes.fromhex(said["fingerprint"]),
            int(said["group"]),
            bytes.fromhex(said["root"]),
            tuple(tokens.tolist()),
            int(said["priority"]),
        )
        if not 0 <= record.priority <= MAX_PRIORITY:
            raise RejectedFileError("the priority is out of range")
        return BlockFile(record, rows, bytes.fromhex(said["checksum"]))
    except (KeyError, ValueError) as error:
        raise RejectedFileError(f"{type(error).__name__}: {error}") from None


def _checksum(record: BlockRecord, rows: NDArray[Any], keys: Keys) -> bytes:
    said = (FORMAT, str(record.group), str(record.priority), rows.dtype.str, str(rows.shape))
    contiguous = np.ascontiguousarray(rows).data.cast("B")
    return keys.checksum(
        (record.fingerprint, record.root, *(s.encode() for s in said), token_bytes(record.tokens), contiguous)
    )
