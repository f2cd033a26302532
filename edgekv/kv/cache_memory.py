"""The memory of a cache: groups of equal layers, reallocated as tokens arrive, and counted."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from edgekv.kv.arena import Arena
from edgekv.kv.cache_group import CacheGroup
from edgekv.kv.growth import Allocation, single_layers
from edgekv.kv.layers import GroupSetup, make_group
from edgekv.kv.policies.policy import Policy
from edgekv.kv.policies.rotation import KvEncoding
from edgekv.kv.rows import RowGroup
from edgekv.kv.strategies import default_strategy
from edgekv.kv.strategies.pointer_shift import DEFAULT_RESERVE
from edgekv.spec.layers import Geometry


class CacheMemory:
    """Allocates the groups of a cache, and reallocates those that grow.

    Sessions are still bound to the old memory, so it is kept until `free_outgrown`.

    Attributes:
        groups: all groups.
        rows: those with attention.
        wide: those that attend to the whole context, in the order of their layers.
        grows: whether memory is reallocated; otherwise all of it is allocated at the start.
        bytes_held: bytes allocated now.
        peak_bytes: the most bytes allocated at any time.
    """

    def __init__(
        self,
        geometry: Geometry,
        ar: Sequence[int],
        strategy: str | None,
        reserve: Fraction | float | None,
        policy: Policy,
        allocation: Allocation,
        encodings: Sequence[KvEncoding] = (),
    ) -> None:
        """Allocate.

        Args:
            geometry: the sizes.
            ar: tokens per inference of the graphs, ascending.
            strategy: by name; None for `default_strategy`.
            reserve: of `pointer-shift`; None for 2.
            policy: of the groups that attend to the whole context; the others always keep the newest tokens.
            allocation: where memory comes from; only groups that attend to the whole context grow.
            encodings: of each tensor, in the order of the groups' names; matrices of delta rules need them.

        Raises:
            UsageError: an unknown strategy, a growth that it or the layers do not allow; also what `RowArena` raises.
            ValueError: an AR out of range, or growth to another context.
        """
        specs, whole = geometry.groups(), geometry.context
        for spec in specs:
            for tokens in ar:
                spec.past_rows(tokens, whole)
        name = default_strategy(reserve) if strategy is None else strategy
        growth = allocation.growth
        if growth is not None:
            growth.check(geometry.rows(), whole, ar[-1], name)
            specs = single_layers(specs, whole)
        # No closure over the cache: dropping the last reference to it must free its memory.
        setup = GroupSetup(
            ar,
            whole,
            whole if growth is None else growth.contexts[0],
            name,
            DEFAULT_RESERVE if reserve is None else reserve,
            policy,
            allocation.allocate,
            tuple(encodings),
        )
        groups: list[CacheGroup] = []
        for spec in specs:
            groups.append(make_group(spec, setup, groups))
        self.groups = tuple(groups)
        self.rows = tuple(group for group in self.groups if isinstance(group, RowGroup))
        self.wide = tuple(group for group in self.rows if group.geometry.window == whole)
        self.grows = growth is not None
        self._growth = growth
        self._outgrown: list[Arena] = []
        self.bytes_held = self.peak_bytes = self._count()

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """Memory of all groups: one arena each, or two (keys as columns, then values)."""
        return tuple([arena for group in self.groups for arena in group.arenas])

    def grow(self, columns: int, context: int = 0, *, one_by_one: bool = False) -> None:
        """Make room for `columns` tokens and for the graph of `context`.

        Args:
            columns: tokens held, and those of the next step.
            context: S of its graph; 0 if no graph is about to run.
            one_by_one: free a layer's old memory before the next layer grows. No session may be bound to it.
        """
        if self._growth is None:
            return
        contexts = self._growth.contexts_of(len(self.wide), columns)
        for group, least in zip(self.wide, contexts, strict=True):
            if max(least, context) > group.context:
                self._outgrown.extend(group.grow(max(least, context)))
                self.bytes_held = self._count()
                self.peak_bytes = max(self.peak_bytes, self.bytes_held)
                if one_by_one:
                    self.free_outgrown()

    def free_outgrown(self) -> None:
        """Free the memory that was replaced."""
        if self._outgrown:
            self._outgrown.clear()
            self.bytes_held = self._count()

    def _count(self) -> int:
        return sum(arena.bytes_held for arena in (*self.arenas, *self._outgrown))
