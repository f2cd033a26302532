"""A cache on disk: the rows held, by age, in one safetensors file with a record of what they belong to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from edgekv.errors import EdgeKVError
from edgekv.kv.arena import Rows
from edgekv.kv.policies.rotation import KvEncoding
from edgekv.spec.geometry import Geometry
from edgekv.spec.layers import LayeredGeometry
from edgekv.system import open_regular

if TYPE_CHECKING:
    from edgekv.kv.cache import KVCache
    from edgekv.kv.group import Group

FORMAT = "edgekv.kv-state.1"


class StateError(EdgeKVError):
    """A saved cache that is damaged, or that belongs to another model or cache."""


@dataclass(frozen=True, slots=True)
class CacheState:
    """The tokens that a cache holds. It does not depend on where the rows were stored, so any strategy can restore it.

    Attributes:
        sizes: what the cache was made for, as `describe` of its geometry gives it.
        encodings: scale and zero point of each tensor, by the name of its graph input; empty if unknown.
        positions: of the tokens held, oldest first.
        position: of the next token.
        rewindable: how many of the newest tokens could be rewound.
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
    """Write a state, whole or not at all.

    Args:
        state: the state.
        file: is replaced if it exists.
        fingerprint: of what computed the rows, such as a hash of the bundle; the reader must give the same.

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
    content = save({name: np.ascontiguousarray(rows) for name, rows in state.rows.items()}, metadata)
    target = Path(file)
    try:
        with NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as partial:
            try:
                partial.write(content)
                partial.flush()
                os.fsync(partial.fileno())
                Path(partial.name).replace(target)
            except BaseException:
                Path(partial.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise StateError(
            f"state {file}", got=error.strerror, expected="a writable file", fix="Give a path that you can write."
        ) from None


def read_state(file: str | Path, *, fingerprint: str) -> CacheState:
    """Read a state.

    Raises:
        StateError: no such file, a damaged one, another kind of file, or one of another fingerprint.
    """
    try:
        open_regular(Path(file)).close()
        with safe_open(str(file), "np") as opened:
            metadata: dict[str, str] = opened.metadata() or {}
            rows = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, not a dict
    except OSError as error:
        raise _refusal(file, "file", error.strerror or error, "one that can be read") from None
    except SafetensorError as error:
        raise _refusal(file, "file", error, "a whole safetensors file") from None
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


def save_cache(cache: KVCache, file: str | Path, *, fingerprint: str) -> None:
    """Write the state of a cache; see `write_state`."""
    write_state(cache.state, file, fingerprint=fingerprint)


def load_cache(cache: KVCache, file: str | Path, *, fingerprint: str) -> None:
    """Restore what `save_cache` wrote into a cache of any strategy and key layout.

    Raises:
        StateError: the file is damaged, or of another fingerprint, geometry or encoding; nothing is changed then.
    """
    cache.restore(read_state(file, fingerprint=fingerprint))


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


def describe(geometry: Geometry | LayeredGeometry, groups: Sequence[Group]) -> dict[str, object]:
    """The sizes that a state and a cache must agree on: all but the key layout."""
    layers = {
        str(number): [group.geometry.kv_heads, group.geometry.head_dim, group.geometry.context]
        for group in groups
        for number in group.geometry.numbers or range(group.geometry.layers)
    }
    return {"context": geometry.context, "kv_dtype": geometry.kv_dtype, "layers": layers}


def named_encodings(groups: Sequence[Group], encodings: Sequence[KvEncoding]) -> dict[str, tuple[float, int]]:
    """Scale and zero point by the name of the graph input; empty if they are unknown."""
    names = [tensor.past for group in groups for tensor in group.geometry.names()]
    pairs = [(each.scale, each.zero_point) for each in encodings]
    return dict(zip(names, pairs, strict=True)) if pairs else {}


def check_state(
    state: CacheState,
    geometry: Geometry | LayeredGeometry,
    groups: Sequence[Group],
    encodings: Sequence[KvEncoding],
) -> None:
    """Refuse a state of another geometry or encoding.

    Raises:
        StateError: they differ.
    """
    for field, found, expected in (
        ("geometry", state.sizes, describe(geometry, groups)),
        ("encodings", state.encodings, named_encodings(groups, encodings)),
    ):
        if found != expected:
            raise StateError(f"state: {field}", got=found, expected=expected, fix="Use a cache of the same model.")
