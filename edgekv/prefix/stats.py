"""Statistics of a prefix store."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier.

    Attributes:
        blocks: blocks held now.
        bytes_held: bytes in use now; files include their headers.
        bytes_in: bytes written to the tier so far.
        bytes_out: bytes read from the tier so far.
        evictions: blocks that were moved to a lower tier or dropped.
    """

    blocks: int
    bytes_held: int
    bytes_in: int
    bytes_out: int
    evictions: int

    def since(self, earlier: TierStats) -> TierStats:
        """Counts since `earlier`; `blocks` and `bytes_held` are current values."""
        return TierStats(
            self.blocks,
            self.bytes_held,
            self.bytes_in - earlier.bytes_in,
            self.bytes_out - earlier.bytes_out,
            self.evictions - earlier.evictions,
        )


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters since the store was created.

    Attributes:
        hits: matches of at least one token.
        partial_hits: hits that end within a block.
        misses: lookups that found no token.
        tokens_asked: tokens of all sequences looked up.
        tokens_saved: tokens that were found.
        blocks_inserted: blocks that were stored, counted for each group.
        blocks_refused: insertions that ended early because all memory was in use.
        rejected_files: foreign, corrupt, truncated or unreadable block files, and files whose prefix is missing.
        failed_writes: block files that could not be written.
        primary: the working memory of the store; `bytes_out` counts what was fetched or offloaded.
        host: secondary memory.
        disk: the folder.
    """

    hits: int
    partial_hits: int
    misses: int
    tokens_asked: int
    tokens_saved: int
    blocks_inserted: int
    blocks_refused: int
    rejected_files: int
    failed_writes: int
    primary: TierStats
    host: TierStats
    disk: TierStats

    def since(self, earlier: StoreStats) -> StoreStats:
        """Counts since `earlier`; `blocks` and `bytes_held` are current values."""
        changes: dict[str, Any] = {}
        for name in (field.name for field in fields(StoreStats)):
            now, then = getattr(self, name), getattr(earlier, name)
            changes[name] = now.since(then) if isinstance(now, TierStats) else now - then
        return StoreStats(**changes)


class Counters:
    """The counters of `StoreStats`; lists are indexed by tier."""

    def __init__(self) -> None:
        self.hits = self.partial_hits = self.misses = 0
        self.tokens_asked = self.tokens_saved = 0
        self.blocks_inserted = self.blocks_refused = 0
        self.rejected_files = self.failed_writes = 0
        self.bytes_in = [0, 0, 0]
        self.bytes_out = [0, 0, 0]
        self.evictions = [0, 0, 0]

    def count_match(self, asked: int, found: int, *, partial: bool) -> None:
        """Count a match of `found` out of `asked` tokens."""
        self.hits += found > 0
        self.misses += found == 0
        self.partial_hits += partial
        self.tokens_asked += asked
        self.tokens_saved += found

    def snapshot(self, blocks: list[int], bytes_held: list[int]) -> StoreStats:
        """A snapshot of the counters, with the current content of each tier."""
        primary, host, disk = (
            TierStats(blocks[i], bytes_held[i], self.bytes_in[i], self.bytes_out[i], self.evictions[i])
            for i in range(3)
        )
        return StoreStats(
            self.hits,
            self.partial_hits,
            self.misses,
            self.tokens_asked,
            self.tokens_saved,
            self.blocks_inserted,
            self.blocks_refused,
            self.rejected_files,
            self.failed_writes,
            primary,
            host,
            disk,
        )
