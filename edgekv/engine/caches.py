"""Options of a model's KV caches: update strategy, reserve, context policy, growth and cache mode."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from edgekv.bundle import Bundle, Manifest
from edgekv.engine.cache_mode import CacheMode
from edgekv.engine.sink import read_sink
from edgekv.engine.stats import Setup
from edgekv.errors import UsageError
from edgekv.kv import (
    DEFAULT_RESERVE,
    Allocation,
    ConvSpec,
    KVCache,
    Policy,
    RowSpec,
    Sink,
    default_strategy,
    parse_growth,
    parse_reserve,
)
from edgekv.kv.growth import AT_ONCE
from edgekv.kv.memory import Allocate, HeapMemory
from edgekv.kv.policies.text import parse_policy
from edgekv.runtime import Engine, HtpEngine
from edgekv.runtime.engine import run_by, wide_prefill_of
from edgekv.runtime.load_options import CacheOptions

_MIN_CONTEXT = 2
_FIXED = ("slot", "shift-concat")
"""Strategies that bind the same addresses in every step."""


@dataclass(frozen=True, slots=True)
class CacheSetup:
    """The options that all caches of a model share.

    Attributes:
        manifest: of the bundle, as the engine runs it.
        strategy: update strategy.
        reserve: memory of `pointer-shift`, in units of S-1 rows per tensor.
        policy: context policy: what happens when the context is full.
        mode: which sequences are kept.
        sink: the tokens that every sequence begins with; None if the graphs compute them.
        ar: tokens per inference of the graphs.
        allocation: where the memory comes from, and how it grows.
        reproducible: whether a prompt must have the same logits whatever is cached of it.
    """

    manifest: Manifest
    strategy: str
    reserve: Fraction
    policy: Policy
    mode: CacheMode
    sink: Sink | None
    ar: frozenset[int]
    allocation: Allocation = AT_ONCE
    reproducible: bool = False

    @classmethod
    def read(cls, bundle: Bundle, engine: Engine, options: CacheOptions) -> CacheSetup:
        """Parse options as users write them, for an engine that is bound to the caches.

        Raises:
            UsageError: an unknown name, or options that exclude each other.
            BundleError: the file of the sink is broken.
        """
        kv_update, reserve, policy = options.kv_update, options.reserve, options.policy
        cache_mode, kv_growth = options.cache_mode, options.kv_growth
        manifest = run_by(engine, bundle.manifest)
        strategy = kv_update or default_strategy(reserve)
        if reserve is not None and strategy != "pointer-shift":
            got, fix = f"{reserve} with {strategy}", "Leave it out, or choose pointer-shift."
            raise UsageError("reserve", got=got, expected="the update strategy pointer-shift", fix=fix)
        ratio = DEFAULT_RESERVE if reserve is None else parse_reserve(reserve)
        moved = [group.row_bytes for group in manifest.cache_geometry.groups() if isinstance(group, RowSpec | ConvSpec)]
        row_bytes = next((size for size in moved if size % engine.alignment_bytes), 0)
        if row_bytes and strategy != "slot":
            raise UsageError(
                "update strategy",
                got=f"{strategy} with rows of {row_bytes} bytes on the engine {engine.name}",
                expected=f"rows of a multiple of {engine.alignment_bytes} bytes, which it can be bound to anywhere",
                fix="Use slot, which stays at one address.",
            )
        mode = CacheMode.parse(cache_mode) if isinstance(cache_mode, str) else cache_mode
        chosen = (
            parse_policy(policy, manifest.rotations[""].inverse_frequencies.tolist())
            if isinstance(policy, str)
            else policy
        )
        obstacle = manifest.model.keys_cannot_move
        if obstacle is not None and chosen.inverse_frequencies:
            raise UsageError(
                f"context policy {chosen.name}",
                got=obstacle,
                expected="one, by which the keys of all layers can be moved",
                fix="Use fail or sliding-window.",
            )
        if kv_growth is not None and mode.budget is not None:
            got, fix = f"{kv_growth} with {mode}", "Leave it out, or choose another cache mode."
            expected = "a cache mode without a memory budget, which counts on sequences of one size"
            raise UsageError("growth", got=got, expected=expected, fix=fix)
        growth = None if kv_growth is None else parse_growth(kv_growth, manifest.contexts)
        ar = frozenset(graph.ar for graph in manifest.graphs)
        if chosen.name == "fail":  # elsewhere the size of steps decides which tokens leave
            ar |= {graph.ar for graph in wide_prefill_of(engine, manifest)}
        if manifest.model.bidirectional:
            ar = frozenset({1})
        allocation = Allocation(growth, _allocate(engine, strategy))
        sink = read_sink(bundle, manifest)
        return cls(manifest, strategy, ratio, chosen, mode, sink, ar, allocation, options.reproducible)

    def make(self) -> KVCache:
        """Allocate a cache.

        Raises:
            UsageError: options that do not fit the bundle's graphs.
        """
        geometry = self.manifest.cache_geometry
        if self.manifest.model.bidirectional:
            geometry = geometry.in_context(_MIN_CONTEXT)  # graphs read none of it
        cache = KVCache(
            geometry,
            ar=self.ar,
            strategy=self.strategy,
            reserve=self.reserve,
            policy=self.policy,
            encodings=[self.manifest.encodings[tensor.past] for tensor in geometry.names()],
            sink=self.sink,
            allocation=self.allocation,
        )
        self.mode.check(cache)
        return cache

    def make_window(self) -> KVCache:
        """Allocate memory for rows of several sequences side by side; see `Batch`."""
        geometry = self.manifest.cache_geometry
        memory = Allocation(allocate=self.allocation.allocate)
        return KVCache(geometry, ar=self.ar, strategy="slot", policy="fail", allocation=memory)

    def described(self, engine: Engine) -> Setup:
        """The options as the statistics of a generation report them."""
        reserve = float(self.reserve) if self.strategy == "pointer-shift" else None
        growth = None if self.allocation.growth is None else self.allocation.growth.name
        htp = engine.options if isinstance(engine, HtpEngine) else None
        return Setup(engine.name, self.strategy, reserve, str(self.mode), growth, htp)


def _allocate(engine: Engine, strategy: str) -> Allocate:
    """Where an engine wants its caches to be.

    Raises:
        UsageError: shared memory was asked for, with a strategy that binds another address in every step.
    """
    if not isinstance(engine, HtpEngine) or engine.shared is None:
        return HeapMemory
    if strategy in _FIXED:
        return engine.shared
    if engine.options.shared_memory == "auto":
        return HeapMemory
    raise UsageError(
        "htp shared-memory",
        got=f"yes with the update strategy {strategy}",
        expected=f"{' or '.join(_FIXED)}: each address is registered with the HTP once",
        fix="Use slot, or leave shared-memory out.",
    )
