"""What a manager of sequences holds, and how well it serves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """The state now, and counters since the manager was made.

    Attributes:
        total_sequences: sequences held.
        total_bytes: bytes allocated for them.
        used_bytes: bytes of the rows that hold a token.
        total_tokens: tokens held.
        lookups: how often a sequence was asked for.
        hits: how often it was there.
        evictions: sequences that gave way to memory pressure.
    """

    total_sequences: int
    total_bytes: int
    used_bytes: int
    total_tokens: int
    lookups: int
    hits: int
    evictions: int

    @property
    def average_length(self) -> float:
        """Tokens held by a sequence, on average; 0 if there is none."""
        return self.total_tokens / self.total_sequences if self.total_sequences else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the lookups that were hits; 0 before the first."""
        return self.hits / self.lookups if self.lookups else 0.0

    @property
    def efficiency(self) -> float:
        """Share of the allocated bytes that hold tokens; 0 if nothing is allocated."""
        return self.used_bytes / self.total_bytes if self.total_bytes else 0.0
