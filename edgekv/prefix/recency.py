"""The order of eviction: last use, and priorities that expire."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic_ns, time_ns

from edgekv.prefix.block import Block
from edgekv.prefix.heap import BlockHeap, EvictionQueues
from edgekv.prefix.retention import DEFAULT_PRIORITY, Retention
from edgekv.prefix.storage import BlockStorage


def now_ms() -> int:
    """A monotonic clock in milliseconds."""
    return monotonic_ns() // 1_000_000


class Recency:
    """Stamps blocks as they are used, and resets priorities when their time is over."""

    def __init__(self, queues: EvictionQueues, storage: BlockStorage, clock_ms: Callable[[], int]) -> None:
        """Start without blocks.

        Args:
            queues: updated when a block's position changes.
            storage: records the use of blocks that have files.
            clock_ms: a monotonic clock in milliseconds.
        """
        self._queues = queues
        self._storage = storage
        self._clock_ms = clock_ms
        self._stamp = 0
        self._now_ns = 0
        self._expiring = BlockHeap(lambda block: None if block.expires_ms is None else (block.expires_ms,))

    def touch(self, block: Block) -> None:
        """Make a guarded block the most recently used one."""
        self._stamp += 1
        block.stamp = self._stamp
        self._now_ns = max(self._now_ns + 1, time_ns())
        block.used_ns = self._now_ns
        self._storage.used(block)

    def adopt(self, blocks: Iterable[Block]) -> None:
        """Insert blocks of other processes by their last use, least recent first."""
        for block in blocks:
            self._stamp += 1
            block.stamp = self._stamp
            self._queues.push(block)

    def retain(self, block: Block, retention: Retention) -> None:
        """Set the priority of a guarded block."""
        block.priority = retention.priority
        block.expires_ms = None if retention.duration_ms is None else self._clock_ms() + retention.duration_ms
        self._expiring.push(block)

    def expire(self) -> None:
        """Reset expired priorities to the default."""
        while (first := self._expiring.first()) is not None and first[0][0] <= self._clock_ms():
            block = first[1]
            self._expiring.pop()
            block.priority, block.expires_ms = DEFAULT_PRIORITY, None
            self._queues.push(block)
