"""The positions of the tokens held, at which their keys were rotated."""

from __future__ import annotations

from collections.abc import Sequence


class Positions:
    """Positions ascend and the newest are consecutive, so only those before a gap are listed.

    Attributes:
        length: tokens held.
        next: position of the next token.
        seen: tokens of the text so far.
        rewindable: number of newest tokens that can be dropped without crossing an evicted one.
    """

    __slots__ = ("_older", "length", "next", "rewindable", "seen")

    def __init__(self) -> None:
        self.reset()

    def reset(self, tokens: int = 0) -> None:
        """Hold the first tokens of a text, at their own positions."""
        self.restore(range(tokens), tokens, tokens)
        self.seen = tokens

    def restore(self, positions: Sequence[int], next_position: int, rewindable: int) -> None:
        """Restore earlier values of `listed`, `next` and `rewindable`."""
        length = len(positions)
        start = length
        while start and positions[start - 1] == next_position - (length - start) - 1:
            start -= 1
        self.next = next_position
        self.rewindable = rewindable
        self.length = length
        self._older = list(positions[:start])

    def listed(self) -> list[int]:
        """Position of each token held, oldest first."""
        return [*self._older, *range(self.next - (self.length - len(self._older)), self.next)]

    def commit(self, tokens: int, evicted: int) -> None:
        """Append tokens and evict the oldest."""
        self.next += tokens
        self.seen += tokens
        self.length += tokens - evicted
        self.rewindable = min(self.rewindable + tokens, self.length)
        if self._older:
            del self._older[:evicted]

    def rewind(self, tokens: int) -> None:
        """Drop the newest tokens, at most `rewindable`."""
        self.next -= tokens
        self.seen -= tokens
        self.length -= tokens
        self.rewindable -= tokens

    def drop(self, ages: Sequence[int]) -> None:
        """Drop the tokens of these ages, ascending and at least one; the others keep their positions."""
        gone = set(ages)
        kept = [position for age, position in enumerate(self.listed()) if age not in gone]
        self.restore(kept, self.next, min(self.rewindable, self.length - 1 - ages[-1]))

    def renumber(self) -> list[int]:
        """Renumber the tokens held from position 0; return the shift of each token."""
        moved = [age - position for age, position in enumerate(self.listed())]
        self.restore(range(self.length), self.length, self.rewindable)
        return moved
