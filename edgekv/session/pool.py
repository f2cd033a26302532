"""Many sequences, each with a cache of its own, within a budget."""

from __future__ import annotations

from collections.abc import Callable

from edgekv.errors import MemoryBudgetError, UsageError
from edgekv.kv import KVCache
from edgekv.session.budget import Budget
from edgekv.session.held import HeldSequence
from edgekv.session.pool_stats import SequenceStats

_IDS = 1 << 64


class SequenceManager:
    """Sequences by a 64-bit id, kept until they are dropped or give way to memory pressure.

    Whoever is asked for is in use; all others may give way, the least recently used first. Pressure is looked at
    whenever a sequence is asked for, never in between.
    """

    def __init__(
        self,
        make_cache: Callable[[], KVCache],
        *,
        bytes_per_sequence: int,
        budget: Budget | None = None,
        evicts: bool = False,
        release: Callable[[KVCache], None] = lambda _: None,
    ) -> None:
        """Hold nothing yet.

        Args:
            make_cache: allocates the cache of a sequence.
            bytes_per_sequence: what that takes, so that the budget is looked at before.
            budget: what all may hold together; None for no limit.
            evicts: whether sequences give way to a new one when the budget is used up; else it is refused.
            release: told of each cache that is let go of, so that nobody else keeps its memory alive.
        """
        self._make_cache = make_cache
        self._bytes_per_sequence = bytes_per_sequence
        self._budget = budget
        self._evicts = evicts
        self._release = release
        self._held: dict[int, HeldSequence] = {}  # least recently used first
        self._lookups = 0
        self._hits = 0
        self._evictions = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._held

    @property
    def ids(self) -> list[int]:
        """The sequences held, the least recently used first."""
        return list(self._held)

    @property
    def memory_bytes(self) -> int:
        """Bytes allocated for all sequences."""
        return sum(held.cache.stats.bytes_held for held in self._held.values())

    @property
    def stats(self) -> SequenceStats:
        """What is held now, and how well it served so far."""
        caches = [held.cache for held in self._held.values()]
        return SequenceStats(
            total_sequences=len(caches),
            total_bytes=self.memory_bytes,
            used_bytes=sum(cache.used_bytes for cache in caches),
            total_tokens=sum(cache.length for cache in caches),
            lookups=self._lookups,
            hits=self._hits,
            evictions=self._evictions,
        )

    def get(self, sequence: int) -> HeldSequence | None:
        """The sequence, which is now the most recently used; None if it is not held.

        Raises:
            UsageError: no 64-bit id.
        """
        _check_id(sequence)
        self._lookups += 1
        held = self.touch(sequence)
        self._hits += held is not None
        return held

    def get_or_create(self, sequence: int) -> HeldSequence:
        """The sequence, which is now the most recently used; a new, empty one if it was not held.

        Raises:
            UsageError: no 64-bit id.
            MemoryBudgetError: a new one does not fit; nothing has changed then.
        """
        held = self.get(sequence)
        if held is None:
            self._make_room(self._bytes_per_sequence, None)
            held = self._held[sequence] = HeldSequence(self._make_cache())
        elif self._evicts:
            self._make_room(0, sequence)
        return held

    def touch(self, sequence: int) -> HeldSequence | None:
        """As `get`, but not counted: for whoever asked before and goes on."""
        held = self._held.pop(sequence, None)
        if held is not None:
            self._held[sequence] = held
        return held

    def drop(self, sequence: int) -> bool:
        """Let go of a sequence and its memory; False if it was not held.

        Raises:
            UsageError: no 64-bit id.
        """
        _check_id(sequence)
        held = self._held.pop(sequence, None)
        if held is not None:
            self._release(held.cache)
        return held is not None

    def clear(self) -> None:
        """Let go of all sequences."""
        for sequence in self.ids:
            self.drop(sequence)

    def _make_room(self, wanted_bytes: int, in_use: int | None) -> None:
        if self._budget is None:
            return
        held_bytes = self.memory_bytes
        allowance_bytes = self._budget.allowance_bytes(held_bytes)
        if wanted_bytes and wanted_bytes + (0 if self._evicts else held_bytes) > allowance_bytes:
            held = "" if self._evicts else f" beside {held_bytes:,} held"
            raise MemoryBudgetError(
                "memory budget of the sequences",
                got=f"{wanted_bytes:,} bytes for a new one{held}",
                expected=f"at most {allowance_bytes:,}",
                fix="Give a larger budget, or export with a smaller --context."
                if self._evicts
                else "Drop a sequence, give a larger budget, or choose the cache mode adaptive.",
            )
        for sequence in self.ids:
            if held_bytes + wanted_bytes <= allowance_bytes:
                return
            if sequence != in_use:
                held_bytes -= self._held[sequence].cache.stats.bytes_held
                self.drop(sequence)
                self._evictions += 1


def _check_id(sequence: int) -> None:
    if isinstance(sequence, bool) or not isinstance(sequence, int) or not 0 <= sequence < _IDS:
        wanted = "a whole number of 64 bits, from 0 on"
        raise UsageError("sequence", got=repr(sequence), expected=wanted, fix="Use 0, 1, 2, ... or a 64-bit hash.")
