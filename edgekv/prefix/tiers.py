"""Which block is in which tier: allocation, eviction by priority, offloading and restoring. Integers only.

With full attention a block is usable only with all blocks before it. Two invariants follow:
a block is in memory only if the one before it is in the same or a faster tier of memory, and a block has a file
only if the one before it has one. Blocks of a limited window are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from edgekv.prefix.allocator import BlockAllocator
from edgekv.prefix.block import ABSENT, Block, Node, Tier
from edgekv.prefix.budget import Limits
from edgekv.prefix.heap import EvictionQueues
from edgekv.prefix.recency import Recency
from edgekv.prefix.references import References
from edgekv.prefix.stats import Counters
from edgekv.prefix.storage import BlockStorage
from edgekv.prefix.tree import Tree


class Tiers:
    """All tiers of all groups.

    Attributes:
        pools: ids of each memory, by group.
        references: the requests that use blocks, which keep them from being evicted.
        recency: order of use and priorities of the blocks.
        disk_bytes: bytes of this store's files.
        disk_blocks: number of these files.

    Args:
        tree: finds blocks; blocks in no tier are removed from it.
        limited: for each group, whether its attention window is limited.
        limits: capacities of the tiers.
        storage: moves the bytes.
        counters: updated by every operation.
        clock_ms: a monotonic clock in milliseconds.
    """

    def __init__(
        self,
        tree: Tree,
        limited: Sequence[bool],
        limits: Limits,
        storage: BlockStorage,
        counters: Counters,
        clock_ms: Callable[[], int],
    ) -> None:
        self.pools = {
            Tier.PRIMARY: [BlockAllocator(blocks) for blocks in limits.primary],
            Tier.HOST: [BlockAllocator(blocks) for blocks in limits.host],
        }
        self.disk_bytes = 0
        self.disk_blocks = 0
        self._has_disk = limits.disk
        self._tree = tree
        self._limited = limited
        self._min_priority = limits.offload_min_priority
        self._storage = storage
        self._counters = counters
        self._queues = EvictionQueues(self.pools)
        self.references = References(self.pools[Tier.PRIMARY], self._queues)
        self.recency = Recency(self._queues, storage, clock_ms)

    def held(self) -> tuple[list[int], list[int]]:
        """Blocks and bytes in each tier."""
        blocks, held_bytes = [0, 0, self.disk_blocks], [0, 0, self.disk_bytes]
        for tier, pools in self.pools.items():
            for group, pool in enumerate(pools):
                blocks[tier] += pool.used
                held_bytes[tier] += pool.used * self._storage.block_bytes(group)
        return blocks, held_bytes

    def room(self, group: int, tier: Tier) -> int | None:
        """A free id in a memory, evicting if necessary; None if every block is needed."""
        pool = self.pools[tier][group]
        if (free := pool.allocate()) is not None or not pool.capacity:
            return free
        victim = self._queues.pop(tier, group)
        if victim is None:
            return None
        self._evict(victim, tier)
        return pool.allocate()

    def place(self, block: Block, tier: Tier, place: int) -> None:
        """Record that a block is in a tier."""
        block.places[tier] = place
        if tier is Tier.DISK:
            self.disk_bytes += place
            self.disk_blocks += 1
        if (before := self._before(block)) is not None:
            before.following[tier] += 1
        self._queues.push(block)

    def bring(self, block: Block) -> bool:
        """Bring a guarded block into primary memory; False if there is no memory or its file is unusable."""
        if block.is_in(Tier.PRIMARY):
            return True
        if block.is_in(Tier.HOST) and self._swap(block):
            return True
        free = self.room(block.group, Tier.PRIMARY)
        if free is None:
            return False
        if block.is_in(Tier.HOST):
            self._storage.move(block.group, Tier.HOST, block.places[Tier.HOST], Tier.PRIMARY, free)
            self.place(block, Tier.PRIMARY, free)
            self._take(block, Tier.HOST)
        elif self._storage.load(block, free):
            self.place(block, Tier.PRIMARY, free)
        else:
            self.pools[Tier.PRIMARY][block.group].release(free)
            self._take(block, Tier.DISK)
            self._remove(block)
            return False
        return True

    def save(self, block: Block, *, displace: bool = True) -> bool:
        """Write a block's file, and the files of the preceding blocks that it depends on.

        Args:
            block: a block in memory.
            displace: if False, never evict a file of higher rank than the block.

        Returns:
            Whether it is on the disk now.
        """
        if not self._has_disk:
            return False
        chain = [block]
        while (before := self._before(chain[-1])) is not None:
            chain.append(before)
            if before.is_in(Tier.DISK):
                break
        self.references.guard(chain)
        try:
            return all(self._save_one(link, displace=displace) for link in reversed(chain))
        finally:
            self.references.unguard(chain)

    def fit_disk(self) -> None:
        """Evict files until the limit holds."""
        if self._has_disk:
            self._storage.fit_disk(self._lose_file)

    def lose_files(self, blocks: Iterable[Block]) -> None:
        """Record that the files of these blocks are gone."""
        for block in blocks:
            if block.is_in(Tier.DISK):
                self._lose_file(block)

    def drop(self, node: Node) -> None:
        """Drop a node without children that no request uses."""
        for block in node.blocks:
            if block is not None:
                self._discard(block, evicted=False)
        self._tree.prune(node)

    def make_private(self, node: Node) -> None:
        """Remove a childless node from the tree; its blocks' references pass to the caller."""
        for block in node.blocks:
            if block is not None:
                block.guards += 1
                if block.is_in(Tier.DISK):
                    self._storage.remove_file(block)
                    self._take(block, Tier.DISK)
                self._leave(block, Tier.PRIMARY)
        node.blocks = [None] * len(node.blocks)
        self._tree.prune(node)

    def _save_one(self, block: Block, *, displace: bool) -> bool:
        if block.is_in(Tier.DISK):
            return True
        data = self._storage.encode(block, Tier.PRIMARY if block.is_in(Tier.PRIMARY) else Tier.HOST)
        if not self._storage.write_file(block, data, self._lose_file, displace=displace):
            return False
        self.place(block, Tier.DISK, len(data))
        return True

    def _lose_file(self, block: Block) -> None:
        """Record that a file is gone, and remove the files that need it."""
        if block.following[Tier.DISK]:
            for node in reversed(block.node.subtree()[1:]):
                other = node.blocks[block.group]
                if other is not None and other.is_in(Tier.DISK):
                    self._storage.remove_file(other)
                    self._lose_file(other)
        self._take(block, Tier.DISK)
        if block.is_nowhere:
            self._remove(block)

    def _evict(self, block: Block, tier: Tier) -> None:
        """Move a block out of a tier, into the next one if its priority allows."""
        self._counters.evictions[tier] += 1
        needed = block.following[Tier.HOST] > 0
        worth = self._is_worth(block)
        if tier is Tier.PRIMARY and worth and self._offload(block):
            return
        if needed:
            self._evict_following(block)
        if worth:
            self.save(block)
        self._take(block, tier)
        if block.is_nowhere:
            self._remove(block)

    def _offload(self, block: Block) -> bool:
        self.references.guard([block])
        free = self.room(block.group, Tier.HOST)
        self.references.unguard([block])
        if free is None:
            return False
        self._storage.move(block.group, Tier.PRIMARY, block.places[Tier.PRIMARY], Tier.HOST, free)
        self._take(block, Tier.PRIMARY)
        self.place(block, Tier.HOST, free)
        return True

    def _swap(self, block: Block) -> bool:
        """If primary memory is full, swap its next victim with a block of host memory."""
        pool = self.pools[Tier.PRIMARY][block.group]
        first = self._queues.first(Tier.PRIMARY, block.group) if pool.used == pool.capacity else None
        if first is None or not self._is_worth(first):
            return False
        victim = first
        self._queues.pop(Tier.PRIMARY, block.group)
        primary_id, host_id = victim.places[Tier.PRIMARY], block.places[Tier.HOST]
        self._storage.swap(block.group, primary_id, host_id)
        self._counters.evictions[Tier.PRIMARY] += 1
        for moved, source, target, place in (
            (victim, Tier.PRIMARY, Tier.HOST, host_id),
            (block, Tier.HOST, Tier.PRIMARY, primary_id),
        ):
            self._leave(moved, source)
            moved.places[source] = ABSENT
            self.place(moved, target, place)
        return True

    def _is_worth(self, block: Block) -> bool:
        """Whether a block that leaves primary memory is kept in the next tier."""
        return block.following[Tier.HOST] > 0 or block.priority >= self._min_priority

    def _evict_following(self, block: Block) -> None:
        """Evict the successors of a block from host memory when the block leaves memory."""
        self.references.guard([block])
        for node in reversed(block.node.subtree()[1:]):
            following = node.blocks[block.group]
            if following is not None and following.is_in(Tier.HOST):
                self._evict(following, Tier.HOST)
        self.references.unguard([block])

    def _take(self, block: Block, tier: Tier) -> None:
        """Record that a block is no longer in a tier."""
        place = block.places[tier]
        self._leave(block, tier)
        block.places[tier] = ABSENT
        if tier is Tier.DISK:
            self.disk_bytes -= place
            self.disk_blocks -= 1
        else:
            self.pools[tier][block.group].release(place)

    def _leave(self, block: Block, tier: Tier) -> None:
        if (before := self._before(block)) is not None:
            before.following[tier] -= 1
            self._queues.push(before)

    def _remove(self, block: Block) -> None:
        """Remove a block that is in no tier from the tree; with full attention, also all blocks that need it."""
        node = block.node
        node.blocks[block.group] = None
        block.expires_ms = None
        if not self._limited[block.group]:
            for dead in reversed(node.subtree()):
                for other in dead.blocks:
                    if other is not None:
                        self._discard(other)
                self._tree.prune(dead)
        self._tree.prune(node)

    def _discard(self, block: Block, *, evicted: bool = True) -> None:
        for tier in Tier:
            if block.is_in(tier):
                self._counters.evictions[tier] += evicted
                if tier is Tier.DISK:
                    self._storage.remove_file(block)
                self._take(block, tier)
        block.node.blocks[block.group] = None
        block.expires_ms = None

    def _before(self, block: Block) -> Block | None:
        """The preceding block that a block of full attention needs."""
        parent = block.node.parent
        return None if parent is None or self._limited[block.group] else parent.blocks[block.group]
