"""Which blocks are in use, by requests or by an operation in progress, and cannot be evicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgekv.prefix.allocator import BlockAllocator
from edgekv.prefix.block import ABSENT, Block, Tier
from edgekv.prefix.heap import EvictionQueues


class References:
    """Guards of operations, and references of requests to blocks in primary memory."""

    def __init__(self, primary: Sequence[BlockAllocator], queues: EvictionQueues) -> None:
        """Start without any.

        Args:
            primary: ids of primary memory, by group; they count the references.
            queues: updated when a block may be evicted again.
        """
        self._primary = primary
        self._queues = queues

    def guard(self, blocks: Iterable[Block]) -> None:
        """Keep blocks from being evicted until `unguard`."""
        for block in blocks:
            block.guards += 1

    def unguard(self, blocks: Iterable[Block]) -> None:
        """Undo one `guard` of each block."""
        for block in blocks:
            block.guards -= 1
            self._queues.push(block)

    def retain(self, block: Block) -> None:
        """Keep a block in primary memory for one more request."""
        self._primary[block.group].retain(block.places[Tier.PRIMARY])

    def release(self, block: Block) -> None:
        """Undo one `retain`."""
        if self._primary[block.group].release(block.places[Tier.PRIMARY]):
            block.places[Tier.PRIMARY] = ABSENT
        self._queues.push(block)

    def is_held(self, block: Block) -> bool:
        """Whether a request uses the block."""
        return block.is_in(Tier.PRIMARY) and self._primary[block.group].references(block.places[Tier.PRIMARY]) > 1
