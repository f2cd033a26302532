"""Sessions by id, within a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count

from edgekv.engine.cache_mode import Always, Mode
from edgekv.engine.session import Session, common_tokens
from edgekv.errors import MemoryBudgetError, UsageError

_IDS = 1 << 64


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Current state, and counters since the pool was created, without the pool's own session.

    Attributes:
        total_sequences: sequences held.
        total_bytes: bytes allocated for them.
        used_bytes: bytes of the rows in use.
        total_tokens: tokens held.
        lookups: number of lookups.
        hits: lookups that found their sequence.
        evictions: sequences that were evicted under memory pressure.
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
        """Mean number of tokens per sequence; 0 if there is none."""
        return self.total_tokens / self.total_sequences if self.total_sequences else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the lookups that were hits; 0 before the first."""
        return self.hits / self.lookups if self.lookups else 0.0

    @property
    def efficiency(self) -> float:
        """Share of the allocated bytes that hold tokens; 0 if nothing is allocated."""
        return self.used_bytes / self.total_bytes if self.total_bytes else 0.0


@dataclass(slots=True)
class _Taken:
    """A sequence that the pool has chosen an id for.

    Attributes:
        owner: only texts of the same owner continue it.
        is_busy: whether it is taken.
        used: when it was taken last; a larger number is later.
    """

    owner: Hashable
    is_busy: bool = True
    used: int = 0


class SessionPool:
    """Sessions by a 64-bit id, kept until they are dropped or evicted. Callers choose the ids, or `best` does.

    The session looked up last is in use; all others may be evicted: first those of calls that have ended, the least
    recently used first. Memory pressure is checked at every lookup that could free another. Other threads may only
    call `drop` and `clear` of a model's pool.

    Attributes:
        own: the session of calls without an id, and of all steps that recompute a sequence.
        mode: the cache mode, which includes the budget.
        is_closed: whether its sessions were let go.
    """

    def __init__(
        self,
        make_session: Callable[[], Session],
        mode: Mode | None = None,
        own: Session | None = None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """Start with only the own session.

        Args:
            make_session: allocates a session; all sessions need the same memory.
            mode: None for `always`.
            own: the own session; None makes one.
            lock: of the engine's driver, so that `drop` and `clear` wait for the end of a step; None for one thread.
        """
        self.own = make_session() if own is None else own
        self.mode: Mode = Always() if mode is None else mode
        self._recomputed_tokens = self.mode.recomputed_tokens
        self._lock = nullcontext() if lock is None else lock
        self._make_session = make_session
        self._bytes_per_session = self.own.cache.bytes_held
        self._held: dict[int, Session] = {}  # least recently used first
        self.is_closed = False
        self._lookups = 0
        self._hits = 0
        self._evictions = 0
        self._taken: dict[int, _Taken] = {}
        self._clock = count(1)

    def close(self) -> None:
        """Let all sessions go, also its own. Nothing is looked up afterwards."""
        self.is_closed = True
        self._held.clear()
        self._taken.clear()
        del self.own, self._make_session

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
        return sum([held.bytes_held for held in self._held.values()])

    @property
    def stats(self) -> PoolStats:
        """Current state and counters."""
        caches = [held.cache for held in self._held.values()]
        return PoolStats(
            total_sequences=len(caches),
            total_bytes=self.memory_bytes,
            used_bytes=sum(cache.used_bytes for cache in caches),
            total_tokens=sum(cache.length for cache in caches),
            lookups=self._lookups,
            hits=self._hits,
            evictions=self._evictions,
        )

    @property
    def has_room(self) -> bool:
        """Whether the budget has room for another session beside all that are held."""
        budget, held_bytes = self.mode.budget, self.memory_bytes
        return budget is None or held_bytes + self._bytes_per_session <= budget.allowance_bytes(held_bytes)

    @property
    def taken(self) -> int:
        """How many sequences are taken."""
        return sum(each.is_busy for each in self._taken.values())

    def best(self, tokens: Sequence[int], salt: str | None, adapter: str | None, most: int) -> int | None:
        """The id of the cache in which a text goes on; nobody else takes it until `give_back`.

        It is that of the idle sequence that has most of the text, if more of it is kept than lost. Otherwise it is a
        new one, in place of the idle sequence used least recently if there are too many.

        Args:
            tokens: the text.
            salt: only texts with the same salt go on in each other's caches.
            adapter: the adapters of the text, and of the cache.
            most: sequences that may be taken or idle at once.

        Returns:
            None if all are taken, or the memory has no room for another.
        """
        owner = salt, adapter
        best = self._best(tokens, owner)
        while best is None and (len(self._taken) >= most or (self._taken and not self.has_room)):
            idle = {id: each.used for id, each in self._taken.items() if not each.is_busy}
            if not idle:
                return None
            self._forget(min(idle, key=idle.__getitem__))
        now = next(self._clock)  # also an id that was never used
        found = now if best is None else best
        self._taken[found] = _Taken(owner, used=now)
        return found

    def give_back(self, sequence: int) -> None:
        """The text of a taken sequence has ended; its tokens stay in the cache."""
        self._taken[sequence].is_busy = False
        held = self._held.get(sequence)
        if held is None or not held.tokens:
            self._forget(sequence)

    def forget_idle(self) -> None:
        """Free all sequences that were taken and given back."""
        for sequence in [id for id, each in self._taken.items() if not each.is_busy]:
            self._forget(sequence)

    def _best(self, tokens: Sequence[int], owner: Hashable) -> int | None:
        best, most = None, 0
        for sequence, each in self._taken.items():
            held = self._held.get(sequence)
            if each.is_busy or each.owner != owner or held is None:
                continue
            common = common_tokens(held.tokens, tokens)
            if common > most and common >= len(held.tokens) - common:
                best, most = sequence, common
        return best

    def _forget(self, sequence: int) -> None:
        del self._taken[sequence]
        self.drop(sequence)

    def keeps(self, tokens: int) -> bool:
        """Whether the mode keeps the keys and values of a sequence of this length."""
        return self._recomputed_tokens is not None and tokens > self._recomputed_tokens

    def claim(self, sequence: int | None, tokens: int) -> None:
        """Allocate the memory of a sequence of this length, so that it fails before any work.

        Raises:
            UsageError: the id is not a 64-bit integer.
            MemoryBudgetError: it does not fit.
        """
        if sequence is None:
            return
        if self.keeps(tokens):
            self.get_or_create(sequence)
        else:
            self.free(sequence)  # recomputed sequences need no memory

    def place(self, sequence: int | None, tokens: int) -> Session:
        """The session for the next step of a sequence of this length.

        Raises:
            MemoryBudgetError: the sequence needs a new cache, which does not fit.
        """
        if sequence is None or not self.keeps(tokens):
            return self.own
        return self.touch(sequence) or self.get_or_create(sequence)

    def get(self, sequence: int) -> Session | None:
        """The session, which is now the most recently used; None if it is not held.

        Raises:
            UsageError: the id is not a 64-bit integer.
        """
        _check_id(sequence)
        self._lookups += 1
        held = self.touch(sequence)
        self._hits += held is not None
        return held

    def get_or_create(self, sequence: int) -> Session:
        """The session, which is now the most recently used; a new, empty one if it was not held.

        Raises:
            UsageError: the id is not a 64-bit integer.
            MemoryBudgetError: a new one does not fit; nothing has changed then.
        """
        held = self.get(sequence)
        if held is None:
            self._make_room(self._bytes_per_session, None)
            held = self._held[sequence] = self._make_session()
        elif self.mode.evicts and len(self._held) > 1:  # with one, nothing could be freed
            self._make_room(0, sequence)
        return held

    def touch(self, sequence: int | None) -> Session | None:
        """As `get` without counting, for later steps of a call. None is the own session."""
        if sequence is None:
            return self.own
        held = self._held.pop(sequence, None)
        if held is not None:
            self._held[sequence] = held
        return held

    def drop(self, sequence: int) -> bool:
        """Free a session, between two steps; False if it was not held.

        Raises:
            UsageError: the id is not a 64-bit integer.
        """
        with self._lock:
            return self.free(sequence)

    def clear(self) -> None:
        """Free all sessions, between two steps."""
        with self._lock:
            for sequence in self.ids:
                self.free(sequence)

    def free(self, sequence: int) -> bool:
        """As `drop`, for a caller that has the lock."""
        _check_id(sequence)
        held = self._held.pop(sequence, None)
        if held is not None:
            held.yield_to(self.own)
        return held is not None

    def _make_room(self, wanted_bytes: int, in_use: int | None) -> None:
        budget, evicts = self.mode.budget, self.mode.evicts
        if budget is None:
            return
        held_bytes = self.memory_bytes
        allowance_bytes = budget.allowance_bytes(held_bytes)
        if wanted_bytes and wanted_bytes + (0 if evicts else held_bytes) > allowance_bytes:
            held = "" if evicts else f" beside {held_bytes:,} held"
            raise MemoryBudgetError(
                "memory budget of the sequences",
                got=f"{wanted_bytes:,} bytes for a new one{held}",
                expected=f"at most {allowance_bytes:,}",
                fix="Give a larger budget, or export with a smaller --context."
                if evicts
                else "Drop a sequence, give a larger budget, or choose the cache mode adaptive.",
            )
        for sequence in sorted(self.ids, key=lambda each: self._held[each].is_busy):  # what runs now comes last
            if held_bytes + wanted_bytes <= allowance_bytes:
                return
            if sequence != in_use:
                held_bytes -= self._held[sequence].bytes_held
                self.free(sequence)
                self._evictions += 1


def _check_id(sequence: int) -> None:
    if isinstance(sequence, bool) or not isinstance(sequence, int) or not 0 <= sequence < _IDS:
        wanted, fix = "a whole number of 64 bits, from 0 on", "Use 0, 1, 2, ... or a 64-bit hash."
        is_huge = isinstance(sequence, int) and sequence.bit_length() > 4 * 64
        raise UsageError(
            "sequence",
            got=f"a number of {sequence.bit_length()} bits" if is_huge else repr(sequence),
            expected=wanted,
            fix=fix,
        )
