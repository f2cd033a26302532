"""Sessions by id, within a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence as Tokens
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count

from edgekv.engine.cache_mode import CacheMode
from edgekv.engine.request import DEFAULT_CACHE
from edgekv.engine.sequence import Sequence
from edgekv.engine.session import Session, common_tokens
from edgekv.errors import MemoryBudgetError, UsageError

_IDS = 1 << 64
_FIRST_CHOSEN = 1 << 63
"""Callers choose the first ids, or hashes."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Current state, and counters since the pool was created, without the default one.

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
class _Row:
    """A cache, and who has it.

    Attributes:
        session: the cache and its tokens; None while nothing is kept.
        owner: only texts of the same owner go on in it; None for a cache whose id callers choose.
        sequence: what runs in it; None while it is idle.
    """

    session: Session | None = None
    owner: Hashable = None
    sequence: Sequence | None = None


class SessionPool:
    """Sessions by a 64-bit id, kept until they are dropped or evicted. Callers choose the ids, or `choose` does.

    The session looked up last is in use; all others may be evicted: first those in which no sequence runs, the least
    recently used first. Memory pressure is checked at every lookup that could free another. Other threads may only
    call `drop` and `clear` of a model's pool.

    Attributes:
        default: the session of the id `DEFAULT_CACHE`, and of all steps that recompute a sequence.
        mode: the cache mode, which includes the budget.
        is_closed: whether its sessions were let go.
    """

    def __init__(
        self,
        make_session: Callable[[], Session],
        mode: CacheMode | None = None,
        default: Session | None = None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """Start with only the default one.

        Args:
            make_session: allocates a session; all sessions need the same memory.
            mode: None for `always`.
            default: that session; None makes one.
            lock: of the engine, so that `drop` and `clear` wait for the end of a step; None for one thread.
        """
        self.default = make_session() if default is None else default
        self.mode = CacheMode() if mode is None else mode
        self._lock = nullcontext() if lock is None else lock
        self._make_session = make_session
        self._bytes_per_session = self.default.cache.bytes_held
        self._default_row = _Row(self.default)
        self._rows: dict[int, _Row] = {}  # least recently used first
        self._chosen_ids = count(_FIRST_CHOSEN)
        self.is_closed = False
        self._lookups = 0
        self._hits = 0
        self._evictions = 0

    def close(self) -> None:
        """Let all sessions go, also the default one. Nothing is looked up afterwards."""
        self.is_closed = True
        self._rows.clear()
        del self.default, self._default_row, self._make_session

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self.ids

    @property
    def _held(self) -> dict[int, Session]:
        return {id: row.session for id, row in self._rows.items() if row.session is not None}

    @property
    def ids(self) -> list[int]:
        """The sequences held, the least recently used first."""
        return [*self._held]

    @property
    def memory_bytes(self) -> int:
        """Bytes allocated for all sequences."""
        return sum([session.bytes_held for session in self._held.values()])

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
        held_bytes = self.memory_bytes
        allowance_bytes = self.mode.allowance_bytes(held_bytes)
        return allowance_bytes is None or held_bytes + self._bytes_per_session <= allowance_bytes

    # ------------------------------------------------------------------ who has which

    @property
    def taken(self) -> int:
        """How many of the caches that the pool chose have a sequence that runs in them."""
        return sum(row.owner is not None and row.sequence is not None for row in self._rows.values())

    def holder(self, cache: int) -> Sequence | None:
        """The sequence that runs in a cache; None if it is free."""
        row = self._default_row if cache == DEFAULT_CACHE else self._rows.get(cache)
        return None if row is None else row.sequence

    def choose(self, tokens: Tokens[int], owner: Hashable, most: int) -> int | None:
        """The id of the cache in which a text goes on; `take` it.

        It is that of the idle cache that has most of the text, if at least half of its tokens are kept. Otherwise it is
        a new one, in place of the idle cache used least recently if there are too many.

        Args:
            tokens: the text.
            owner: only texts of the same owner go on in each other's caches.
            most: caches that may be taken or idle at once.

        Returns:
            None if all are taken, or the memory has no room for another.
        """
        best = self._best(tokens, owner)
        while best is None and ((chosen := self._chosen_count) >= most or (chosen and not self.has_room)):
            idle = (id for id, row in self._rows.items() if row.owner is not None and row.sequence is None)
            if (oldest := next(idle, None)) is None:
                return None
            self._forget(oldest)
        if best is None:
            best = next(self._chosen_ids)
            self._rows[best] = _Row(owner=owner)
        return best

    def take(self, cache: int, sequence: Sequence) -> None:
        """Let a sequence run in a cache, which nobody else has, until `release`."""
        if cache == DEFAULT_CACHE:
            self._default_row.sequence = sequence
        else:
            check_id(cache)
            self._rows.setdefault(cache, _Row()).sequence = sequence

    def release(self, sequence: Sequence, cache: int | None) -> None:
        """Let a cache go in which a sequence ran, if it still does; what it has computed stays there."""
        if cache is None:
            return
        row = self._default_row if cache == DEFAULT_CACHE else self._rows.get(cache)
        if row is None or row.sequence is not sequence:
            return
        row.sequence = None
        if cache != DEFAULT_CACHE and (row.session is None or (row.owner is not None and not row.session.tokens)):
            self._forget(cache)

    def forget_idle(self) -> None:
        """Free all caches that `choose` has chosen and in which nothing runs."""
        for cache in [id for id, row in self._rows.items() if row.owner is not None and row.sequence is None]:
            self._forget(cache)

    @property
    def _chosen_count(self) -> int:
        return sum(row.owner is not None for row in self._rows.values())

    def _best(self, tokens: Tokens[int], owner: Hashable) -> int | None:
        best, most = None, 0
        for cache, row in self._rows.items():
            session = row.session
            if row.owner is None or row.owner != owner or row.sequence is not None or session is None:
                continue
            common = common_tokens(session.tokens, tokens)
            if common > most and common >= len(session.tokens) - common:
                best, most = cache, common
        return best

    def _forget(self, cache: int) -> None:
        self.free(cache)
        self._rows.pop(cache, None)

    # ------------------------------------------------------------------ sessions

    def keeps(self, tokens: int) -> bool:
        """Whether the mode keeps the keys and values of a sequence of this length."""
        return self.mode.keeps(tokens)

    def claim(self, sequence: int, tokens: int) -> None:
        """Allocate the memory of a sequence of this length, so that it fails before any work.

        Raises:
            UsageError: the id is not a 64-bit integer.
            MemoryBudgetError: it does not fit.
        """
        if sequence == DEFAULT_CACHE:
            return
        if self.keeps(tokens):
            self.get_or_create(sequence)
        else:
            self.free(sequence)  # recomputed sequences need no memory

    def place(self, sequence: int, tokens: int) -> Session:
        """The session for the next step of a sequence of this length.

        Raises:
            MemoryBudgetError: the sequence needs a new cache, which does not fit.
        """
        if sequence == DEFAULT_CACHE or not self.keeps(tokens):
            return self.default
        return self.touch(sequence) or self.get_or_create(sequence)

    def get(self, sequence: int) -> Session | None:
        """The session, which is now the most recently used; None if it is not held.

        Raises:
            UsageError: the id is not a 64-bit integer.
        """
        check_id(sequence)
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
            held = self._make_session()
            row = self._rows.pop(sequence, None) or _Row()
            row.session = held
            self._rows[sequence] = row
        elif self.mode.evicts and len(self) > 1:  # with one, nothing could be freed
            self._make_room(0, sequence)
        return held

    def touch(self, sequence: int) -> Session | None:
        """As `get` without counting, for later steps of a call; also of the id `DEFAULT_CACHE`."""
        if sequence == DEFAULT_CACHE:
            return self.default
        row = self._rows.get(sequence)
        if row is None or row.session is None:
            return None
        del self._rows[sequence]
        self._rows[sequence] = row
        return row.session

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
        check_id(sequence)
        row = self._rows.get(sequence)
        if row is None or row.session is None:
            return False
        session, row.session = row.session, None
        if row.sequence is None:
            del self._rows[sequence]
        session.yield_to(self.default)
        return True

    def _make_room(self, wanted_bytes: int, in_use: int | None) -> None:
        if self.mode.budget is None:
            return
        held_bytes, evicts = self.memory_bytes, self.mode.evicts
        allowance_bytes = self.mode.allowance_bytes(held_bytes)
        assert allowance_bytes is not None, "there is a budget"
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
        held_sessions = self._held
        for sequence in sorted(held_sessions, key=lambda id: self._rows[id].sequence is not None):  # what runs is last
            if held_bytes + wanted_bytes <= allowance_bytes:
                return
            if sequence != in_use:
                held_bytes -= held_sessions[sequence].bytes_held
                self.free(sequence)
                self._evictions += 1


def check_id(sequence: int) -> int:
    """An id that a caller gives.

    Raises:
        UsageError: it is not a 64-bit integer.
    """
    if isinstance(sequence, bool) or not isinstance(sequence, int) or not 0 <= sequence < _IDS:
        expected, fix = "a whole number of 64 bits, from 0 on", "Use 0, 1, 2, ... or a 64-bit hash."
        is_huge = isinstance(sequence, int) and sequence.bit_length() > 4 * 64
        raise UsageError(
            "sequence",
            got=f"a number of {sequence.bit_length()} bits" if is_huge else repr(sequence),
            expected=expected,
            fix=fix,
        )
    return sequence
