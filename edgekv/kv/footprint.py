"""The memory of a cache, which may grow: what is held now, and what sessions are still bound to."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.kv.group import Group
from edgekv.kv.growth import Growth
from edgekv.kv.store import Store


class Footprint:
    """Replaces the memory of groups by larger memory as tokens come.

    Sessions are still bound to what was replaced, so it lives until `let_go`.
    """

    def __init__(self, groups: Sequence[Group], growing: Sequence[Group], growth: Growth | None) -> None:
        """Grow nothing yet.

        Args:
            groups: all whose memory is counted.
            growing: those that grow, in the order of their layers.
            growth: how; None if all memory is there from the beginning.
        """
        self._groups = groups
        self._growing = growing
        self._growth = growth
        self._outgrown: list[Store] = []
        self._peak_bytes = self.bytes_held

    @property
    def bytes_held(self) -> int:
        """Bytes that are allocated now."""
        stores = [store for group in self._groups for store in group.stores]
        return sum(store.bytes_held for store in (*stores, *self._outgrown))

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated at a time."""
        return self._peak_bytes

    def grow(self, columns: int, context: int = 0, *, one_by_one: bool = False) -> None:
        """Make room for so many tokens and for the graph of `context`.

        Args:
            columns: tokens held, and those of the next step.
            context: S of its graph; 0 if none is about to run.
            one_by_one: let go of a layer's memory before the next one grows. No session may be bound to it.
        """
        if self._growth is None:
            return
        wanted = self._growth.contexts_of(len(self._growing), columns)
        for group, least in zip(self._growing, wanted, strict=True):
            if max(least, context) > group.context:
                self._outgrown.extend(group.grow(max(least, context)))
                self._peak_bytes = max(self._peak_bytes, self.bytes_held)
                if one_by_one:
                    self.let_go()

    def let_go(self) -> None:
        """Free what was replaced."""
        self._outgrown.clear()
