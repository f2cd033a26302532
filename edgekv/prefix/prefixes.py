"""How generations use a prefix store: they restore from it before prefill and store to it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from edgekv.bundle import Bundle, Manifest
from edgekv.errors import UsageError
from edgekv.kv import KVCache, StateError
from edgekv.prefix.baked import baked_prefixes, load_baked
from edgekv.prefix.config import StoreConfig
from edgekv.prefix.retention import RetentionPolicy
from edgekv.prefix.rows import CacheRows
from edgekv.prefix.stats import StoreStats, add_since, counts
from edgekv.prefix.store import Match, PrefixStore, Snapshot

Cut = Callable[[Sequence[int], int, int], int]
"""The last place among tokens, at or before another, where steps may begin that end at multiples of a window."""
PrefixCache = str | Path | StoreConfig | PrefixStore


@dataclass(frozen=True, slots=True)
class SharedStore:
    """A store and how a model uses it.

    Attributes:
        writes: whether generations store their tokens.
        is_own: whether the model opened the store; it then closes it.
        window: the length of every prefix is a multiple of it; 0 for any length. See `Session.stable_tokens`.
    """

    store: PrefixStore
    writes: bool
    is_own: bool
    window: int = 0

    def close(self) -> None:
        """End the model's use of the store; a store of the caller stays open."""
        if self.is_own:
            self.store.close()


def open_store(
    bundle: Bundle,
    manifest: Manifest,
    engine: str,
    cache: KVCache,
    prefix_cache: PrefixCache | None,
    window: int = 0,
    min_block_tokens: int = 0,
) -> SharedStore | None:
    """Open a model's prefix store and load the bundle's own prefixes into it.

    Models and engines may share a folder: none finds another's blocks.

    Args:
        bundle: of the graphs and of baked prefixes.
        manifest: of the bundle, as the engine runs it.
        engine: runs the graphs.
        cache: prefixes are restored into such caches.
        prefix_cache: a store, its folder or its configuration; None for the bundle's own prefixes, if it has any.
        window: see `SharedStore`. Stores with another one are others.
        min_block_tokens: at least one window where the rows of a window depend on all of its tokens, since no block may
            hold a part of one.

    Raises:
        UsageError: the store belongs to another bundle or engine.
        PrefixError: an invalid configuration.
        BundleError: the bundle's prefixes are broken.
    """
    baked = [entry for entry in baked_prefixes(bundle.path) if entry.engine == engine]
    if prefix_cache is None and not baked:
        return None
    fingerprint = prefix_fingerprint(manifest, engine, window)
    if isinstance(prefix_cache, PrefixStore):
        if (prefix_cache.geometry, prefix_cache.fingerprint, prefix_cache.snapshots) != (
            cache.geometry,
            fingerprint,
            cache.has_states,
        ):
            own = f"prefix_fingerprint(manifest, engine{f', {window}' if window else ''})"
            fix = f"Open it with the bundle's geometry, {own} and snapshots={cache.has_states}."
            raise UsageError("prefix_cache", got="a store of another bundle", expected="one of this bundle", fix=fix)
        if (block := prefix_cache.config.tokens_per_block) < min_block_tokens:
            got, fix = f"blocks of {block} tokens", f"Open it with tokens_per_block={min_block_tokens}."
            raise UsageError("prefix_cache", got=got, expected=f"at least {min_block_tokens}, a window", fix=fix)
        shared = SharedStore(prefix_cache, writes=True, is_own=False, window=window)
    else:
        config = (
            StoreConfig(disk_folder=Path(prefix_cache))
            if isinstance(prefix_cache, (str, Path))
            else prefix_cache or StoreConfig()
        )
        config = replace(config, tokens_per_block=max(config.tokens_per_block, min_block_tokens))
        store = PrefixStore(cache.geometry, config, fingerprint=fingerprint, snapshots=cache.has_states)
        shared = SharedStore(store, writes=prefix_cache is not None, is_own=True, window=window)
    try:
        load_baked(bundle, shared.store, engine)
    except BaseException:
        shared.close()
        raise
    return shared


def prefix_fingerprint(manifest: Manifest, engine: str, window: int = 0) -> str:
    """A hash of a bundle's graphs, weights, encodings and RoPE, as an engine runs them, and of that engine.

    Engines differ in the last bit, so each one reuses only its own rows. With a `window`, rows of whole windows of
    prompts are kept apart from others; see `Session.stable_tokens`.
    """
    engine = f"{engine} in windows of {window}" if window else engine
    said = (manifest.files, manifest.encodings, manifest.context, manifest.model, manifest.kv_dtype, engine)
    return hashlib.sha256(msgspec.json.encode(said, order="sorted")).hexdigest()


@dataclass(slots=True)
class Prefixes:
    """One generation's use of a store; see `PrefixStore.match` and `insert`. PrefixError if a salt is empty."""

    shared: SharedStore
    salt: str | None
    retention: RetentionPolicy | None
    adapter: str | None
    prompt_tokens: int
    _seen_tokens: int = field(default=0, init=False)
    _counters: StoreStats = field(default_factory=StoreStats, init=False)

    def __post_init__(self) -> None:
        self._store.root(self.salt, self.adapter)

    @property
    def _store(self) -> PrefixStore:
        return self.shared.store

    @property
    def stats(self) -> StoreStats:
        """The store's counters for the calls of this generation only, and its current content."""
        return self._store.stats_of(self._counters)

    def restore(self, cache: KVCache, tokens: Sequence[int], held: int, cut: Cut) -> int:
        """Restore the longest stored prefix of a sequence into a cache that holds its first `held` tokens.

        A prefix that is not longer is left, and none is looked for where the cache lacks less than a block. The last
        token is never restored, because its logits are needed. A snapshot that the cache refuses is removed from the
        store, and the next shorter prefix is taken.

        Args:
            cache: the memory.
            tokens: of the sequence.
            held: see above.
            cut: where steps may begin.

        Returns:
            Tokens in the cache now.
        """
        if len(tokens) - held < self._store.config.tokens_per_block <= held:
            return held
        with self._counted():
            while (match := self._match(cache, tokens, cut)).tokens > held:
                try:
                    with cache.hold(match.tokens):
                        self._store.restore(match, CacheRows(cache, self._store.groups))
                        if match.states is not None:
                            cache.load_states(match.states.arrays)
                    return match.tokens
                except StateError:
                    self._store.reject_snapshot(match)
                    cache.reset()
                    held = 0
                except BaseException:
                    cache.reset()
                    raise
        return held

    def keep(self, cache: KVCache, tokens: Sequence[int], stable: int) -> None:
        """Store the blocks of the first `stable` tokens that have become full, and the states after each."""
        step = self._store.config.tokens_per_block
        if stable // step > self._seen_tokens // step:
            first = (self._seen_tokens // step + 1) * step
            for end in range(first, stable + 1, step) if cache.has_states else (stable,):
                self._insert(cache, tokens, end, ended=False)
            self._seen_tokens = stable

    def end(self, cache: KVCache, tokens: Sequence[int], stable: int) -> None:
        """As `keep`, and the last block; save blocks to disk if the store has a folder."""
        self._insert(cache, tokens, stable, ended=True)
        if self.shared.writes:
            with self._counted():
                self._store.save()

    def _match(self, cache: KVCache, tokens: Sequence[int], cut: Cut) -> Match:
        asked = min(len(tokens) - 1, cache.capacity)
        widest = cache.ar[-1]
        safe = cache.geometry.context - widest
        window = self.shared.window
        if cache.policy != "fail" and len(tokens) > safe:
            # These steps may evict tokens, so they must start where they would without a match.
            asked, window = min(asked, safe), max(window, widest)
        match = self._store.match(tokens[:asked], self.salt, self.adapter)
        window = max(window, 1)
        while (end := cut(tokens, match.tokens, window)) < match.tokens:
            match = self._store.match(tokens[:end], self.salt, self.adapter)
        return match

    def _insert(self, cache: KVCache, tokens: Sequence[int], stable: int, *, ended: bool) -> None:
        # After an eviction, rows belong to other tokens or were computed without some of them: not a prefix.
        if not self.shared.writes or cache.dirty or not cache.is_prefix or cache.tokens_seen != len(tokens):
            return
        states = cache.states(stable) if cache.has_states and stable else None
        with self._counted():
            self._store.insert(
                tokens[:stable],
                CacheRows(cache, self._store.groups),
                prompt_tokens=min(self.prompt_tokens, stable),
                retention=self.retention,
                salt=self.salt,
                adapter=self.adapter,
                ended=ended,
                snapshot=None if states is None else Snapshot(stable, states),
            )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count what the store does in the block as this generation's."""
        before = counts(self._store.counters)
        try:
            yield
        finally:
            add_since(self._counters, self._store.counters, before)


def open_prefixes(
    store: SharedStore | None,
    salt: str | None,
    retention: RetentionPolicy | None,
    adapter: str | None,
    prompt_tokens: int,
) -> Prefixes | None:
    """The call's use of the prefix cache; None if there is none. Adapters share no prefixes.

    Args:
        store: the prefix cache.
        salt: see `Model.generate`.
        retention: of the call's blocks.
        adapter: that its rows are computed with.
        prompt_tokens: tokens of its prompt; priorities of later blocks are those of generated tokens.

    Raises:
        UsageError: an empty salt; a salt or a retention policy without a prefix cache.
    """
    if store is not None:
        return Prefixes(store, salt, retention, adapter, prompt_tokens)
    if salt is not None or retention is not None:
        got, fix = "one without a prefix cache", "Give load(..., prefix_cache=...), or leave it out."
        field = "retention" if salt is None else "cache_salt"
        raise UsageError(field, got=got, expected="a prefix cache", fix=fix)
    return None
