"""Blocks in memory, within a budget of bytes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from time import monotonic_ns, time_ns

from edgekv.prefix.block import Block, BlockId
from edgekv.prefix.retention import DEFAULT_PRIORITY, Retention

IsPinned = Callable[[BlockId], bool]
_MIN_HEAP = 64


def now_ms() -> int:
    """A monotonic clock in milliseconds."""
    return monotonic_ns() // 1_000_000


class Memory:
    """Blocks by key and part. The lowest priority is evicted first, then the least recently used.

    A chained block is never evicted before the blocks that follow it.

    Attributes:
        budget_bytes: bytes of all blocks.
        bytes_held: bytes in use.
    """

    def __init__(self, budget_bytes: int, clock_ms: Callable[[], int]) -> None:
        self.budget_bytes = budget_bytes
        self.bytes_held = 0
        self._clock_ms = clock_ms
        self._used = 0
        self._blocks: dict[BlockId, Block] = {}
        self._children: dict[BlockId, list[bytes]] = {}  # the tokens of the blocks after each, sorted
        # An evictable block has an entry with its priority and last use, or earlier ones; see `evict`.
        self._heap: list[tuple[int, int, BlockId]] = []
        self._expiring: list[tuple[int, BlockId]] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def get(self, id: BlockId) -> Block | None:
        """A block, or None."""
        return self._blocks.get(id)

    def neighbours(self, parent: BlockId, tokens: bytes) -> list[bytes]:
        """The tokens of the blocks after a parent that sort just before `tokens`, and not before it.

        No other one has a longer common prefix with `tokens`.
        """
        children = self._children.get(parent, [])
        place = bisect_left(children, tokens)
        return children[max(place - 1, 0) : place + 1]

    def children(self, parent: BlockId) -> list[bytes]:
        """The tokens of all blocks after a parent, sorted."""
        return self._children.get(parent, [])

    def add(self, block: Block) -> None:
        """Add a block; the caller has made room."""
        self.touch(block)
        insort(self._children.setdefault(block.parent, []), block.link.tokens)
        self._push(block)
        self._blocks[block.id] = block
        self.bytes_held += block.size_bytes

    def remove(self, id: BlockId) -> None:
        """Remove a block, if it is there."""
        block = self._blocks.pop(id, None)
        if block is None:
            return
        self.bytes_held -= block.size_bytes
        children = self._children[block.parent]
        del children[bisect_left(children, block.link.tokens)]
        if not children:
            del self._children[block.parent]

    def evict(self, is_pinned: IsPinned) -> Block | None:
        """Remove and return the first block of the order that is not pinned; None if there is none."""
        skipped = []
        try:
            while self._heap:
                priority, used, id = entry = heappop(self._heap)
                block = self._blocks.get(id)
                if block is None or (priority, used) > (block.priority, block.used):
                    continue  # removed, or entered again when its priority was lowered
                if (priority, used) < (block.priority, block.used):
                    self._push(block)
                elif is_pinned(id) or (block.chained and id in self._children):
                    skipped.append(entry)
                else:
                    self.remove(id)
                    return block
            return None
        finally:
            for entry in skipped:
                heappush(self._heap, entry)

    def touch(self, block: Block) -> None:
        """Make a block the most recently used one."""
        self._used = block.used = max(self._used + 1, time_ns())

    def start_after(self, used: int) -> None:
        """Let all later uses be later than this one, even if the clock was set back since."""
        self._used = max(self._used, used)

    def retain(self, block: Block, retention: Retention) -> None:
        """Set the priority of a block, and for how long."""
        block.expires_ms = None if retention.duration_ms is None else self._clock_ms() + retention.duration_ms
        if block.expires_ms is not None:
            heappush(self._expiring, (block.expires_ms, block.id))
        self._set_priority(block, retention.priority)

    def expire(self) -> None:
        """Reset priorities whose time is over to the default."""
        while self._expiring and self._expiring[0][0] <= self._clock_ms():
            expires_ms, id = heappop(self._expiring)
            block = self._blocks.get(id)
            if block is not None and block.expires_ms == expires_ms:
                block.expires_ms = None
                self._set_priority(block, DEFAULT_PRIORITY)

    def _set_priority(self, block: Block, priority: int) -> None:
        is_lower, block.priority = priority < block.priority, priority
        if is_lower:
            self._push(block)

    def _push(self, block: Block) -> None:
        if len(self._heap) > max(_MIN_HEAP, 2 * len(self._blocks)):
            self._heap = [(each.priority, each.used, each.id) for each in self._blocks.values()]
            heapify(self._heap)
        heappush(self._heap, (block.priority, block.used, block.id))
