"""A heap of blocks whose keys may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from edgekv.prefix.allocator import BlockAllocator
from edgekv.prefix.block import ABSENT, Block, Tier

Key = tuple[int, ...]
_LEAST_ENTRIES = 64


class BlockHeap:
    """Returns the block with the smallest key. Push a block again after its key has changed.

    Outdated entries are skipped; they are removed once they make up half of the heap.

    Args:
        key_of: a block's current key; None if the block does not belong in this heap.
    """

    def __init__(self, key_of: Callable[[Block], Key | None]) -> None:
        self._key_of = key_of
        self._entries: list[tuple[Key, int, Block]] = []
        self._pushed = 0
        self._sweep_at = _LEAST_ENTRIES

    def push(self, block: Block) -> None:
        """Add a block under its current key, if it has one."""
        key = self._key_of(block)
        if key is None:
            return
        if len(self._entries) >= self._sweep_at:
            self._sweep()
        self._pushed += 1
        heappush(self._entries, (key, self._pushed, block))

    def first(self) -> tuple[Key, Block] | None:
        """The smallest key and its block, without removing it."""
        while self._entries:
            key, _, block = self._entries[0]
            if self._key_of(block) == key:
                return key, block
            heappop(self._entries)
        return None

    def pop(self) -> Block | None:
        """Remove and return the block with the smallest key."""
        found = self.first()
        if found is None:
            return None
        heappop(self._entries)
        return found[1]

    def _sweep(self) -> None:
        latest = {id(entry[2]): entry for entry in self._entries if self._key_of(entry[2]) == entry[0]}
        self._entries = list(latest.values())
        heapify(self._entries)
        self._sweep_at = max(_LEAST_ENTRIES, 2 * len(self._entries))


class EvictionQueues:
    """The evictable blocks of each memory and group: lowest priority first, then least recently used.

    A block is evictable if no block in its memory depends on it and no request uses it.
    """

    def __init__(self, pools: Mapping[Tier, Sequence[BlockAllocator]]) -> None:
        """Create the queues of these pools, by memory and group."""
        self._pools = pools
        self._heaps = {tier: [BlockHeap(self._key(tier)) for _ in groups] for tier, groups in pools.items()}

    def push(self, block: Block) -> None:
        """Update the queues after a block's state has changed."""
        for tier, heaps in self._heaps.items():
            if block.places[tier] != ABSENT:
                heaps[block.group].push(block)

    def first(self, tier: Tier, group: int) -> Block | None:
        """The block to evict next, without removing it."""
        found = self._heaps[tier][group].first()
        return None if found is None else found[1]

    def pop(self, tier: Tier, group: int) -> Block | None:
        """Remove and return the block to evict next."""
        return self._heaps[tier][group].pop()

    def _key(self, tier: Tier) -> Callable[[Block], Key | None]:
        def key(block: Block) -> Key | None:
            place, following = block.places[tier], block.following
            if place == ABSENT or block.guards or following[tier]:
                return None
            if tier is Tier.HOST and following[Tier.PRIMARY]:
                return None
            if tier is Tier.PRIMARY and self._pools[Tier.PRIMARY][block.group].references(place) > 1:
                return None
            return (block.priority, block.stamp)

        return key
