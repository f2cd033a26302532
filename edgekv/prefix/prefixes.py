"""One generation and the store of prefixes: what it finds there before prefill, and what it leaves."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.kv import KVCache
from edgekv.prefix.cache_rows import CacheRows
from edgekv.prefix.retention import RetentionPolicy
from edgekv.prefix.shared_store import SharedStore
from edgekv.prefix.stats import StoreStats
from edgekv.prefix.store import Match


class Prefixes:
    """What one generation does with a store.

    Attributes:
        stats: of the store, counted over the calls of this generation alone.
    """

    def __init__(self, shared: SharedStore, salt: str | None, retention: RetentionPolicy | None) -> None:
        """Prepare; nothing is looked up yet.

        Raises:
            PrefixError: an empty salt.
        """
        self._store = shared.store
        self._writes = shared.writes
        self._salt = salt
        self._retention = retention
        self._prompt_tokens: int | None = None
        self._seen_tokens = 0
        self._store.check_salt(salt)
        self.stats = shared.store.stats.since(shared.store.stats)

    def restore(self, cache: KVCache, tokens: Sequence[int], held: int) -> int:
        """Let a cache hold the longest stored beginning of a sequence, if that is longer than what it holds.

        The last token is left to be run, since its logits are wanted.

        Args:
            cache: holds the first `held` tokens, or is empty.
            tokens: the sequence.
            held: tokens that need not be restored.

        Returns:
            Tokens held now.
        """
        if self._prompt_tokens is None:
            self._prompt_tokens = len(tokens)
        before = self._store.stats
        match = self._match(cache, tokens)
        try:
            if match.tokens > held:
                cache.hold(match.tokens)
                self._store.restore(match, CacheRows(cache, self._store.groups))
                held = match.tokens
        except BaseException:
            cache.reset()
            raise
        finally:
            self._store.release(match)
            self._count(before)
        return held

    def keep(self, cache: KVCache, tokens: Sequence[int]) -> None:
        """Store the blocks that became full since the last call."""
        step = self._store.config.tokens_per_block
        if len(tokens) // step > self._seen_tokens // step:
            self._insert(cache, tokens, ended=False)
            self._seen_tokens = len(tokens)

    def end(self, cache: KVCache, tokens: Sequence[int]) -> None:
        """Store the last block too, and write to the disk, if the store has one, what is worth it."""
        self._insert(cache, tokens, ended=True)
        if self._writes:
            before = self._store.stats
            self._store.save()
            self._count(before)

    def _match(self, cache: KVCache, tokens: Sequence[int]) -> Match:
        asked = min(len(tokens) - 1, cache.capacity)
        widest = cache.ar[-1]
        safe = cache.geometry.context - widest
        if cache.policy == "fail" or len(tokens) <= safe:
            return self._store.match(tokens[:asked], self._salt)
        # Tokens may leave in these steps: they must begin where they would without a match.
        match = self._store.match(tokens[: min(asked, safe)], self._salt)
        if surplus := match.tokens % widest:
            aligned = match.tokens - surplus
            self._store.release(match)
            match = self._store.match(tokens[:aligned], self._salt)
        return match

    def _insert(self, cache: KVCache, tokens: Sequence[int], *, ended: bool) -> None:
        # Behind an eviction rows stand for other tokens, or were computed without some; they are no prefix.
        if not self._writes or not cache.is_prefix or cache.tokens_seen != len(tokens):
            return
        before = self._store.stats
        self._store.insert(
            tokens,
            CacheRows(cache, self._store.groups),
            prompt_tokens=min(self._prompt_tokens or 0, len(tokens)),
            retention=self._retention,
            salt=self._salt,
            ended=ended,
        )
        self._count(before)

    def _count(self, before: StoreStats) -> None:
        self.stats = self._store.stats.since(before.since(self.stats))
