"""A cache on disk: its rows by age in one safetensors file, with a record of the model they belong to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from edgekv.errors import EdgeKVError
from edgekv.kv.arena import Rows
from edgekv.machine.decoding import convert
from edgekv.machine.private_file import write_private
from edgekv.machine.scratch import atomic_file
from edgekv.machine.system import read_file
from edgekv.machine.tensor_file import MAX_HEADER_BYTES, TensorFileError, decode_tensors, encode_tensors

FORMAT = "edgekv.kv-state.1"
_LARGEST_ROWS_BYTES = 1 << 32

_Position = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]  # rows of pictures have hashes as ids


class StateError(EdgeKVError):
    """The saved cache is damaged or belongs to another model or cache."""


@dataclass(frozen=True, slots=True)
class CacheState:
    """The content of a cache. It is independent of row positions, so any strategy can restore it.

    Attributes:
        sizes: sizes of the cache, from `describe` of its geometry.
        encodings: scale and zero point of each tensor, by the name of its graph input; empty if unknown.
        positions: of the tokens held, oldest first.
        position: of the next token.
        rewindable: number of newest tokens that can be rewound.
        tokens_seen: tokens of the text.
        rows: `[tokens, D]` for each tensor, oldest first, by the name of its graph input; layers that attend to fewer
            tokens hold fewer.
        tokens: the whole text, `tokens_seen` of them; empty if it is unknown.
    """

    sizes: Mapping[str, Any]
    encodings: Mapping[str, tuple[float, int]]
    positions: tuple[int, ...]
    position: int
    rewindable: int
    tokens_seen: int
    rows: Mapping[str, Rows]
    tokens: tuple[int, ...] = ()


def write_state(state: CacheState, file: str | Path, *, fingerprint: str) -> None:
    """Write a state atomically.

    Args:
        state: the state.
        file: the target; replaced if it exists.
        fingerprint: identifies what computed the rows, such as a hash of the bundle; the reader must give the same.

    Raises:
        StateError: the file cannot be written.
    """
    parts = {
        "sizes": state.sizes,
        "encodings": state.encodings,
        "positions": state.positions,
        "position": state.position,
        "rewindable": state.rewindable,
        "tokens_seen": state.tokens_seen,
        "tokens": state.tokens,
        "fingerprint": fingerprint,
    }
    metadata = {"format": FORMAT, **{name: _text(part) for name, part in parts.items()}}
    metadata["sha256"] = _digest(metadata, state.rows)
    content = encode_tensors(state.rows, metadata)
    target = Path(file)
    try:
        with atomic_file(target) as partial:
            write_private(partial, content)
    except OSError as error:
        raise StateError(
            f"state {file}", got=error.strerror, expected="a writable file", fix="Give a path that you can write."
        ) from None


def read_state(file: str | Path, *, fingerprint: str, rows_bytes: int = _LARGEST_ROWS_BYTES) -> CacheState:
    """Read a state.

    Args:
        file: that `write_state` wrote.
        fingerprint: see `write_state`.
        rows_bytes: the most that its rows can have; a file that is larger is not read.

    Raises:
        StateError: the file is missing, damaged, not a state, too large, or has another fingerprint.
    """
    try:
        held = decode_tensors(read_file(Path(file), MAX_HEADER_BYTES + rows_bytes))
    except OSError as error:
        raise _refusal(file, "file", error.strerror or error, "one that can be read") from None
    except TensorFileError as error:
        raise _refusal(file, "file", error, "a whole safetensors file") from None
    metadata, rows = dict(held.metadata), held.arrays
    if metadata.get("format") != FORMAT:
        raise _refusal(file, "format", metadata.get("format", "none"), FORMAT)
    digest = metadata.pop("sha256", "none")
    if digest != (expected := _digest(metadata, rows)):
        raise _refusal(file, "content", f"sha256 {expected}", f"{digest}, as it was written")
    try:
        parts = {name: msgspec.json.decode(text) for name, text in metadata.items() if name != "format"}
        held_parts = convert(parts, _Parts)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refusal(file, "content", error, "the parts of a state") from None
    if held_parts.fingerprint != fingerprint:
        raise _refusal(file, "fingerprint", held_parts.fingerprint, fingerprint)
    held_parts.check(file)
    return CacheState(
        sizes=held_parts.sizes,
        encodings=held_parts.encodings,
        positions=held_parts.positions,
        position=held_parts.position,
        rewindable=held_parts.rewindable,
        tokens_seen=held_parts.tokens_seen,
        rows=rows,
        tokens=held_parts.tokens,
    )


class _Parts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the metadata of a file says; see `CacheState`."""

    sizes: dict[str, Any]
    encodings: dict[str, tuple[float, int]]
    positions: tuple[_Position, ...]
    position: _Position
    rewindable: _Position
    tokens_seen: _Position
    tokens: tuple[_Token, ...]
    fingerprint: str

    def check(self, file: str | Path) -> None:
        """Check that the parts agree: a digest says only that nobody changed them by accident.

        Raises:
            StateError: naming the part.
        """
        held = len(self.positions)
        if [*self.positions] != sorted(set(self.positions)) or (held and self.positions[-1] >= self.position):
            raise _refusal(file, "positions", f"{held} of them", f"ascending ones below {self.position}")
        if self.rewindable > held:
            raise _refusal(file, "rewindable", self.rewindable, f"at most {held}, the tokens held")
        if self.tokens_seen < held or len(self.tokens) not in (0, self.tokens_seen):
            raise _refusal(file, "tokens", f"{len(self.tokens)} of {self.tokens_seen}", f"all, at least {held}")


def _refusal(file: str | Path, field: str, got: object, expected: object) -> StateError:
    return StateError(
        f"state {file}: {field}", got=got, expected=expected, fix="Run the prompt again, and save a new state."
    )


def _text(part: object) -> str:
    return json.dumps(part, sort_keys=True)


def _digest(metadata: Mapping[str, str], rows: Mapping[str, Rows]) -> str:
    """Hash of the metadata, and of every tensor with its name, type and shape."""
    digest = sha256(_text(metadata).encode())
    for name in sorted(rows):
        digest.update(_text((name, rows[name].dtype.name, rows[name].shape)).encode())
        digest.update(np.ascontiguousarray(rows[name]).data)
    return digest.hexdigest()
