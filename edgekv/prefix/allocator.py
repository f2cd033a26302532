"""Blocks as integers: ids and reference counts."""

from __future__ import annotations


class BlockAllocator:
    """Allocates ids `0 .. capacity-1` with reference counts; an id without references is free.

    Freed ids are reused first, so that memory grows with use.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity: got {capacity}; expected 0 or more")
        self.capacity = capacity
        self._freed: list[int] = []
        self._references: list[int] = []

    @property
    def used(self) -> int:
        """Ids that have references."""
        return len(self._references) - len(self._freed)

    def allocate(self) -> int | None:
        """Allocate an id with one reference; None if all are in use."""
        if self._freed:
            block = self._freed.pop()
            self._references[block] = 1
            return block
        if len(self._references) == self.capacity:
            return None
        self._references.append(1)
        return len(self._references) - 1

    def references(self, block: int) -> int:
        """Reference count of an id; 0 if it is free.

        Raises:
            ValueError: no such id.
        """
        if not 0 <= block < self.capacity:
            raise ValueError(f"block: got {block}; expected 0 to {self.capacity - 1}")
        return self._references[block] if block < len(self._references) else 0

    def retain(self, block: int) -> None:
        """Add a reference to an id in use."""
        self._check_used(block)
        self._references[block] += 1

    def release(self, block: int) -> bool:
        """Remove a reference; True if it was the last one."""
        self._check_used(block)
        self._references[block] -= 1
        if self._references[block]:
            return False
        self._freed.append(block)
        return True

    def _check_used(self, block: int) -> None:
        if not self.references(block):
            raise ValueError(f"block: got {block}, which is free; expected one in use")
