"""Statistics of a call."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgekv.kv import CacheStats, KVCache, Requantization
from edgekv.session.graphs import StepTimes


@dataclass(slots=True)
class SessionStats:
    """Statistics of a call so far; each step adds to them.

    Attributes:
        times: of its steps.
        reused_tokens: prompt tokens that were not run: already in the cache, or restored.
        restored_tokens: the part of them restored from the prefix cache.
        computed_tokens: tokens run, including those recomputed.
        bytes_held: bytes of the cache that was used last.
        peak_bytes: maximum bytes of this cache so far.
        reallocations: how often caches replaced the memory of a layer.
        bytes_copied: bytes that caches copied.
        evicted_tokens: tokens that a context policy dropped.
        requantization: rounding error of re-rotated keys in the cache of the last step, since its creation.
        room_tokens: how many more tokens can be run; None if there is no limit.
    """

    times: StepTimes = field(default_factory=StepTimes)
    reused_tokens: int = 0
    restored_tokens: int = 0
    computed_tokens: int = 0
    bytes_held: int = 0
    peak_bytes: int = 0
    reallocations: int = 0
    bytes_copied: int = 0
    evicted_tokens: int = 0
    requantization: Requantization | None = None
    room_tokens: int | None = None

    def add(self, cache: KVCache, times: StepTimes, before: CacheStats, computed: int) -> None:
        """Count steps.

        Args:
            cache: that they extended.
            times: of the steps.
            before: statistics of the cache before them.
            computed: tokens run.
        """
        now = cache.stats
        self.times += times
        self.computed_tokens += computed
        self.bytes_held = now.bytes_held
        self.peak_bytes = now.peak_bytes
        self.reallocations += now.reallocations - before.reallocations
        self.bytes_copied += now.bytes_copied - before.bytes_copied
        self.evicted_tokens += now.evicted - before.evicted
        self.requantization = now.requantization
        self.room_tokens = cache.room_tokens

    def add_room(self, tokens: int) -> None:
        """Rows of an open pass fill the context as committed ones do."""
        if self.room_tokens is not None:
            self.room_tokens += tokens
