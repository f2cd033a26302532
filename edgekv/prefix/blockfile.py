"""The file of one block: safetensors that say what they are and prove it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from edgekv.prefix.keys import Keys, token_bytes
from edgekv.prefix.retention import MAX_PRIORITY

FORMAT = "edgekv-prefix-1"
SUFFIX = ".safetensors"
_ROWS, _TOKENS = "rows", "tokens"


class RejectedFileError(Exception):
    """A file that must not be used; the message says why."""


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """What a block file says of itself.

    Attributes:
        fingerprint: hash of the store's fingerprint and layout.
        group: index of the group.
        root: key of the salt.
        tokens: all tokens from the beginning of the sequence to the end of the block.
        priority: with which it is kept.
    """

    fingerprint: bytes
    group: int
    root: bytes
    tokens: tuple[int, ...]
    priority: int

    def name(self, keys: Keys) -> str:
        """The file's name, in which neither salt nor tokens can be read."""
        return f"{keys.sequence(self.root, token_bytes(self.tokens)).hex()}-g{self.group}{SUFFIX}"


def encode(record: BlockRecord, rows: NDArray[Any], keys: Keys) -> bytes:
    """A whole file for rows `[tensors, tokens_per_block, D]`."""
    metadata = {
        "format": FORMAT,
        "fingerprint": record.fingerprint.hex(),
        "group": str(record.group),
        "root": record.root.hex(),
        "priority": f"{record.priority:03d}",
        "checksum": _checksum(record, rows, keys).hex(),
    }
    data: bytes = save({_ROWS: rows, _TOKENS: np.array(record.tokens, np.int64)}, metadata=metadata)
    return data


def read_record(path: Path) -> BlockRecord:
    """What a file says, without reading its rows: whole as safetensors are, but not yet proved.

    Raises:
        RejectedFileError: it is truncated, or no block file.
        OSError: it cannot be read.
    """
    return _read(path)[0]


def read_rows(path: Path, keys: Keys) -> tuple[BlockRecord, NDArray[Any]]:
    """What a file says and its rows, proved by the checksum.

    Raises:
        RejectedFileError: it is truncated, no block file, or not as it was written.
        OSError: it cannot be read.
    """
    record, checksum, rows = _read(path, rows=True)
    if _checksum(record, rows, keys) != checksum:
        raise RejectedFileError("the checksum differs")
    return record, rows


def _read(path: Path, *, rows: bool = False) -> tuple[BlockRecord, bytes, NDArray[Any]]:
    path.stat()  # an absent file is an OSError, whatever the library calls it
    try:
        with safe_open(path, framework="numpy") as file:
            said = file.metadata() or {}
            if said.get("format") != FORMAT:
                raise RejectedFileError(f"the format is {said.get('format')}, not {FORMAT}")
            tokens = file.get_tensor(_TOKENS)
            if tokens.dtype != np.int64 or tokens.ndim != 1:
                raise RejectedFileError("the tokens are no list of 64-bit integers")
            record = BlockRecord(
                bytes.fromhex(said["fingerprint"]),
                int(said["group"]),
                bytes.fromhex(said["root"]),
                tuple(tokens.tolist()),
                int(said["priority"]),
            )
            if not 0 <= record.priority <= MAX_PRIORITY:
                raise RejectedFileError("the priority is out of range")
            return record, bytes.fromhex(said["checksum"]), file.get_tensor(_ROWS) if rows else tokens
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise RejectedFileError(str(error)) from None


def _checksum(record: BlockRecord, rows: NDArray[Any], keys: Keys) -> bytes:
    said = (FORMAT, str(record.group), str(record.priority), rows.dtype.str, str(rows.shape))
    contiguous = np.ascontiguousarray(rows).data.cast("B")
    return keys.checksum(
        (record.fingerprint, record.root, *(s.encode() for s in said), token_bytes(record.tokens), contiguous)
    )
