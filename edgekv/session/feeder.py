"""Running the tokens of one sequence, with what is kept of it and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from edgekv.kv import CacheStats, Requantization
from edgekv.prefix import Prefixes, StoreStats
from edgekv.runtime.runner import Runner, StepTimes
from edgekv.session.held import HeldSequence
from edgekv.session.mode import Mode
from edgekv.session.pool import SequenceManager


@dataclass(frozen=True, slots=True)
class Fed:
    """What a feeder has done so far.

    Attributes:
        times: of its steps.
        reused_tokens: tokens of the first call, the prompt, that were not run because they were held or restored.
        restored_tokens: those of them that came from the store of prefixes.
        computed_tokens: tokens run, those included that were run again.
        bytes_held: bytes of the cache that was used last.
        peak_bytes: the most that this cache ever had.
        reallocations: how often caches replaced the memory of a layer.
        bytes_copied: bytes that caches copied.
        evicted_tokens: tokens that left because a context policy chose them.
        requantization: what moving keys has cost in the cache of the last step, since that cache was made.
        room: whether a further token may be run.
    """

    times: StepTimes
    reused_tokens: int
    restored_tokens: int
    computed_tokens: int
    bytes_held: int
    peak_bytes: int
    reallocations: int
    bytes_copied: int
    evicted_tokens: int
    requantization: Requantization | None
    room: bool


class SequenceFeeder:
    """Feeds one sequence to the graphs, in the caching mode of the model.

    A sequence that is kept lives in its own cache; what a step computes anew passes through the model's `scratch`.
    A sequence that has given way to memory pressure meanwhile is computed anew from all of its tokens.
    """

    def __init__(
        self,
        runner: Runner,
        mode: Mode,
        scratch: HeldSequence,
        manager: SequenceManager,
        sequence: int | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        """Prepare to feed a sequence.

        Args:
            runner: the graphs.
            mode: when to keep and when to compute anew.
            scratch: the model's own cache.
            manager: where named sequences are kept.
            sequence: the id; None for a sequence that lives in `scratch`.
            prefixes: where beginnings of sequences are found and left, in a mode that keeps all sequences.
        """
        self._runner = runner
        self._mode = mode
        self._scratch = scratch
        self._manager = manager
        self._sequence = sequence
        self._prefixes = prefixes
        self._tokens: list[int] = []
        stats = scratch.cache.stats
        self.done = Fed(StepTimes(0, 0, 0), 0, 0, 0, stats.bytes_held, stats.peak_bytes, 0, 0, 0, None, True)

    def claim(self, tokens: int) -> None:
        """Ask for the cache that a sequence of so many tokens needs, so that a refusal comes before any work.

        Raises:
            UsageError: no 64-bit id.
            MemoryBudgetError: it does not fit.
        """
        if self._sequence is None:
            return
        if self._keeps(tokens):
            self._manager.get_or_create(self._sequence)
        else:
            self._manager.drop(self._sequence)  # what is computed anew holds no memory

    def feed(self, tokens: Sequence[int]) -> NDArray[Any]:
        """Run the next tokens and return the logits of the last one as integers `[V]`, valid until the next step.

        Raises:
            ContextFullError: the context has no room.
            EngineError: the runtime failed.
            MemoryBudgetError: the sequence has grown beyond the threshold, and a cache for it does not fit.
        """
        first = not self._tokens
        known = len(self._tokens)
        self._tokens += tokens
        held = self._place()
        restored = 0
        if not self._keeps(len(self._tokens)):
            held.reset()
            start = 0
        elif held.writer is self and held.cache.tokens_seen == known:
            start = known
        else:
            start, restored = self._recall(held)
        new = self._tokens[start:]
        self._runner.use(held.cache)
        times, before = self._runner.times, held.cache.stats
        try:
            return self._run(held, new)
        finally:
            self._count(held, self._runner.times - times, before, len(new), restored, first)

    def finish(self) -> None:
        """Nothing follows: leave the end of the sequence in the store of prefixes too."""
        if self._prefixes is None or not self._tokens:
            return
        held = self._scratch if self._sequence is None else self._manager.touch(self._sequence)
        if held is not None and held.writer is self:
            self._prefixes.end(held.cache, held.tokens)

    @property
    def prefix_stats(self) -> StoreStats | None:
        """What was done with the store of prefixes; None if there is none."""
        return None if self._prefixes is None else self._prefixes.stats

    def _recall(self, held: HeldSequence) -> tuple[int, int]:
        """How many tokens of the sequence its cache holds now, and how many of these the store has given."""
        start = held.reuse(self._tokens)
        if self._prefixes is None or start == len(self._tokens) - 1:
            return start, 0
        try:
            end = self._prefixes.restore(held.cache, self._tokens, start)
        except BaseException:
            held.reset()
            raise
        if end > start:
            held.adopt(self._tokens[:end])
        return end, end - start

    def _run(self, held: HeldSequence, tokens: Sequence[int]) -> NDArray[Any]:
        """Run tokens; what they fill is left in the store before a layer of limited attention lets go of it."""
        piece = held.cache.ar[-1] if self._prefixes is not None and len(held.cache.groups) > 1 else len(tokens)
        for at in range(0, len(tokens), piece):
            part = tokens[at : at + piece]
            try:
                logits = self._runner.feed(part)
            finally:
                held.record(part, self)
            if self._prefixes is not None:
                self._prefixes.keep(held.cache, held.tokens)
        return logits

    def _keeps(self, tokens: int) -> bool:
        limit = self._mode.recomputed_tokens
        return limit is not None and tokens > limit

    def _place(self) -> HeldSequence:
        if self._sequence is None or not self._keeps(len(self._tokens)):
            return self._scratch
        return self._manager.touch(self._sequence) or self._manager.get_or_create(self._sequence)

    def _count(
        self, held: HeldSequence, times: StepTimes, before: CacheStats, computed: int, restored: int, first: bool
    ) -> None:
        done, cache = self.done, held.cache.stats
        self.done = Fed(
            times=StepTimes(
                done.times.steps + times.steps, done.times.run_ns + times.run_ns, done.times.host_ns + times.host_ns
            ),
            reused_tokens=len(self._tokens) - computed if first else done.reused_tokens,
            restored_tokens=restored if first else done.restored_tokens,
            computed_tokens=done.computed_tokens + computed,
            bytes_held=cache.bytes_held,
            peak_bytes=cache.peak_bytes,
            reallocations=done.reallocations + cache.reallocations - before.reallocations,
            bytes_copied=done.bytes_copied + cache.bytes_copied - before.bytes_copied,
            evicted_tokens=done.evicted_tokens + cache.evicted - before.evicted,
            requantization=cache.requantization,
            room=held.cache.room(1),
        )
