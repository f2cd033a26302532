"""Statistics of a prefix store."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from operator import attrgetter


@dataclass(slots=True)
class TierStats:
    """Memory or the folder: what it holds now, what was written and read, and blocks that made way for others.

    Bytes of files include their headers.
    """

    blocks: int = 0
    bytes_held: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    evictions: int = 0


@dataclass(slots=True)
class StoreStats:
    """Counters of a store since it was created, or of one generation.

    Attributes:
        hits: matches of at least one token.
        partial_hits: hits that end within a block.
        misses: lookups that found no token.
        tokens_asked: tokens of all sequences looked up.
        tokens_saved: tokens that were found.
        blocks_inserted: blocks that were stored, counted for each group.
        blocks_refused: insertions that ended early because all memory was in use.
        rejected_files: block files that were corrupt, truncated, or not private.
        failed_writes: changes of the folder that failed, such as on a full disk.
        memory: blocks in memory.
        disk: the block files of this store; none without a folder.
    """

    hits: int = 0
    partial_hits: int = 0
    misses: int = 0
    tokens_asked: int = 0
    tokens_saved: int = 0
    blocks_inserted: int = 0
    blocks_refused: int = 0
    rejected_files: int = 0
    failed_writes: int = 0
    memory: TierStats = field(default_factory=TierStats)
    disk: TierStats = field(default_factory=TierStats)

    def held(self, memory: tuple[int, int], disk: tuple[int, int]) -> StoreStats:
        """A copy, with the blocks and bytes that are held now."""
        return replace(
            self,
            memory=replace(self.memory, blocks=memory[0], bytes_held=memory[1]),
            disk=replace(self.disk, blocks=disk[0], bytes_held=disk[1]),
        )


_PLACES = tuple(
    f"{field.name}.{tier.name}" if field.name in ("memory", "disk") else field.name
    for field in fields(StoreStats)
    for tier in (fields(TierStats) if field.name in ("memory", "disk") else (field,))
)
counts = attrgetter(*_PLACES)
"""All counters of a `StoreStats`, in one order."""


def add_since(total: StoreStats, now: StoreStats, before: tuple[int, ...]) -> None:
    """Add to statistics what a store has counted since its `counts` were taken."""
    for place, new, old in zip(_PLACES, counts(now), before, strict=True):
        if new != old:
            tier, _, name = place.rpartition(".")
            record = getattr(total, tier) if tier else total
            setattr(record, name, getattr(record, name) + new - old)
