"""A cache and its saved state: what is saved, and whether a state fits, with the same sizes and encodings."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.kv.cache_group import CacheGroup
from edgekv.kv.policies.rotation import KvEncoding
from edgekv.kv.positions import Positions
from edgekv.kv.state import CacheState, StateError
from edgekv.spec.geometry import Geometry
from edgekv.spec.layers import LayeredGeometry


def describe(geometry: Geometry | LayeredGeometry, groups: Sequence[CacheGroup]) -> dict[str, object]:
    """The sizes that a state and a cache must agree on: all but the key layout."""
    layers = {
        str(number): [group.geometry.kv_heads, group.geometry.head_dim, group.geometry.context, *_kinds(group.geometry)]
        for group in groups
        for number in group.geometry.numbers or range(group.geometry.layers)
    }
    return {"context": geometry.context, "kv_dtype": geometry.kv_dtype, "layers": layers}


def named_encodings(groups: Sequence[CacheGroup], encodings: Sequence[KvEncoding]) -> dict[str, tuple[float, int]]:
    """Scale and zero point by the name of the graph input; empty if they are unknown."""
    names = [tensor.past for group in groups for tensor in group.geometry.names()]
    pairs = [(each.scale, each.zero_point) for each in encodings]
    return dict(zip(names, pairs, strict=True)) if pairs else {}


def copy_state(
    geometry: Geometry | LayeredGeometry,
    groups: Sequence[CacheGroup],
    encodings: Sequence[KvEncoding],
    positions: Positions,
) -> CacheState:
    """A copy of the rows and positions of the tokens held."""
    return CacheState(
        sizes=describe(geometry, groups),
        encodings=named_encodings(groups, encodings),
        positions=tuple(positions.listed()),
        position=positions.next,
        rewindable=positions.rewindable,
        tokens_seen=positions.seen,
        rows={name: rows for group in groups for name, rows in group.snapshot().items()},
    )


def check_state(
    state: CacheState,
    geometry: Geometry | LayeredGeometry,
    groups: Sequence[CacheGroup],
    encodings: Sequence[KvEncoding],
) -> None:
    """Refuse a state of another geometry or encoding, or whose rows the groups cannot store.

    Raises:
        StateError: they differ, or there are more tokens than a group holds.
    """
    for field, found, expected in (
        ("geometry", state.sizes, describe(geometry, groups)),
        ("encodings", state.encodings, named_encodings(groups, encodings)),
    ):
        if found != expected:
            raise StateError(f"state: {field}", got=found, expected=expected, fix="Use a cache of the same model.")
    for group in groups:
        if group.geometry.is_state:
            group.check(state.rows, state.tokens_seen)
        else:
            group.check(state.rows, len(state.positions) if group.geometry.context == geometry.context else None)


def _kinds(geometry: Geometry) -> tuple[str, ...]:
    """What layers keep, if that is not keys and values."""
    return geometry.kinds if geometry.is_state else ()
