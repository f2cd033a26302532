"""A cache on disk: its rows by age in one safetensors file, with a record of the model they belong to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from edgekv.errors import EdgeKVError
from edgekv.kv.arena import Rows
from edgekv.system import open_regular
from edgekv.tensor_file import TensorFileError, decode_tensors, encode_tensors

FORMAT = "edgekv.kv-state.1"


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
        with NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as written:
            partial = Path(written.name)
            try:
                written.write(content)
                written.flush()
                os.fsync(written.fileno())
                written.close()  # Windows renames and removes no file that is open
                partial.replace(target)
            except BaseException:
                written.close()
                partial.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise StateError(
            f"state {file}", got=error.strerror, expected="a writable file", fix="Give a path that you can write."
        ) from None


def read_state(file: str | Path, *, fingerprint: str) -> CacheState:
    """Read a state.

    Raises:
        StateError: the file is missing, damaged, not a state, or has another fingerprint.
    """
    try:
        with open_regular(Path(file)) as opened:
            held = decode_tensors(opened.read())
    except OSError as error:
        raise _refusal(file, "file", error.strerror or error, "one that can be read") from None
    except TensorFileError as error:
        raise _refusal(file, "file", error, "a whole safetensors file") from None
    metadata, rows = dict(held.metadata), held.arrays
    if metadata.get("format") != FORMAT:
        raise _refusal(file, "format", metadata.get("format", "none"), FORMAT)
    found = metadata.pop("sha256", "none")
    if found != (wanted := _digest(metadata, rows)):
        raise _refusal(file, "content", f"sha256 {wanted}", f"{found}, as it was written")
    parts = {name: json.loads(text) for name, text in metadata.items() if name != "format"}
    if parts["fingerprint"] != fingerprint:
        raise _refusal(file, "fingerprint", parts["fingerprint"], fingerprint)
    return CacheState(
        sizes=parts["sizes"],
        encodings={name: (scale, zero_point) for name, (scale, zero_point) in parts["encodings"].items()},
        positions=tuple(parts["positions"]),
        position=parts["position"],
        rewindable=parts["rewindable"],
        tokens_seen=parts["tokens_seen"],
        rows=rows,
        tokens=tuple(parts.get("tokens", ())),
    )


def _refusal(file: str | Path, field: str, found: object, wanted: object) -> StateError:
    return StateError(
        f"state {file}: {field}", got=found, expected=wanted, fix="Run the prompt again, and save a new state."
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
