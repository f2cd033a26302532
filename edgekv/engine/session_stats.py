"""Statistics of a call."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgekv.engine.graphs import StepTimes
from edgekv.kv import CacheStats, KVCache, Requantization


@dataclass(slots=True)
class CacheUse:
    """What a call did with its cache.

    Attributes:
        reused_tokens: prompt tokens that were not run: already in the sequence's cache, or restored.
        restored_tokens: the part of them that was copied from the prefix cache.
        computed_tokens: tokens run through the graphs, including those computed again.
        evicted_tokens: tokens that a context policy dropped.
        bytes_held: bytes allocated for the cache that was used last.
        bytes_peak: maximum of `bytes_held` since that cache was created.
        reallocations: how often the memory of a layer was replaced by a larger one.
        bytes_copied: bytes that caches copied.
        requantization: rounding error of re-rotated keys in the cache of the last step, since its creation; None if the
            policy moves no keys, and before the first token.
    """

    reused_tokens: int = 0
    restored_tokens: int = 0
    computed_tokens: int = 0
    evicted_tokens: int = 0
    bytes_held: int = 0
    bytes_peak: int = 0
    reallocations: int = 0
    bytes_copied: int = 0
    requantization: Requantization | None = None


@dataclass(slots=True)
class SessionStats:
    """Statistics of a call so far; each step adds to them.

    Attributes:
        cache: see there.
        times: of its steps.
        room_tokens: how many more tokens can be run; None if there is no limit.
    """

    cache: CacheUse
    times: StepTimes = field(default_factory=StepTimes)
    room_tokens: int | None = None

    def add(self, cache: KVCache, times: StepTimes, before: CacheStats, computed: int) -> None:
        """Count steps.

        Args:
            cache: that they extended.
            times: of the steps.
            before: statistics of the cache before them.
            computed: tokens run.
        """
        now, use = cache.stats, self.cache
        self.times += times
        use.computed_tokens += computed
        use.bytes_held = now.bytes_held
        use.bytes_peak = now.peak_bytes
        use.reallocations += now.reallocations - before.reallocations
        use.bytes_copied += now.bytes_copied - before.bytes_copied
        use.evicted_tokens += now.evicted - before.evicted
        use.requantization = now.requantization
        self.room_tokens = cache.room_tokens

    def add_room(self, tokens: int) -> None:
        """Rows of an open pass fill the context as committed ones do."""
        if self.room_tokens is not None:
            self.room_tokens += tokens
