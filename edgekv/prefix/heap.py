"""A heap of blocks whose keys may change."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from edgekv.prefix.block import Block

Key = tuple[int, ...]
_LEAST_ENTRIES = 64


class BlockHeap:
    """Gives the block with the least key. Whoever changes what a key depends on pushes the block again.

    Entries that are no longer true are passed over, and swept out when they are half of the heap.

    Args:
        key_of: a block's key now; None if it does not belong here now.
    """

    def __init__(self, key_of: Callable[[Block], Key | None]) -> None:
        self._key_of = key_of
        self._entries: list[tuple[Key, int, Block]] = []
        self._pushed = 0
        self._sweep_at = _LEAST_ENTRIES

    def push(self, block: Block) -> None:
        """Enter a block under its present key, if it has one."""
        key = self._key_of(block)
        if key is None:
            return
        if len(self._entries) >= self._sweep_at:
            self._sweep()
        self._pushed += 1
        heappush(self._entries, (key, self._pushed, block))

    def first(self) -> tuple[Key, Block] | None:
        """The least key and its block, which stays."""
        while self._entries:
            key, _, block = self._entries[0]
            if self._key_of(block) == key:
                return key, block
            heappop(self._entries)
        return None

    def pop(self) -> Block | None:
        """Take the block with the least key out."""
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
