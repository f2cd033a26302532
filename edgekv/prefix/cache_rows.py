"""A KV cache as the store of prefixes sees it."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.kv import HeldRows, KVCache
from edgekv.prefix.groups import Group
from edgekv.prefix.rows import Rows


class CacheRows:
    """The rows that a cache holds now, by the groups of a store; a `Source` and a `Target`."""

    def __init__(self, cache: KVCache, groups: Sequence[Group]) -> None:
        """Find the groups' tensors in a cache of the same layers; it must not move while this is used."""
        homes = {tensor: group for group in cache.groups for tensor in group.geometry.names()}
        self._held = []
        for group in groups:
            names = list(group.names())
            self._held.append(HeldRows(homes[names[0]], names, cache.tokens_seen))

    def first(self, group: int) -> int:
        return self._held[group].first

    def read(self, group: int, token: int, out: Rows) -> None:
        self._held[group].read(token, out)

    def write(self, group: int, token: int, rows: Rows) -> None:
        self._held[group].write(token, rows)
