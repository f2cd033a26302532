"""Statistics of a request, and of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from edgekv.engine.session import CacheUse
from edgekv.engine.speculation import SpeculationStats
from edgekv.prefix import StoreStats
from edgekv.qnn.options import HtpOptions
from edgekv.text.output import StopReason
from edgekv.text.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Setup:
    """Engine and cache options of a generation.

    Attributes:
        engine: the engine that ran the graphs.
        kv_update: update strategy of the cache.
        reserve: memory of `pointer-shift` in units of S-1 rows; None for other strategies.
        cache_mode: which sequences are kept from step to step; see `edgekv.engine`.
        kv_growth: how the cache's memory grows; None if all of it is allocated at the start.
        htp: the options of the engine `htp`; None with another engine.
    """

    engine: str
    kv_update: str
    reserve: float | None
    cache_mode: str
    kv_growth: str | None = None
    htp: HtpOptions | None = None


@dataclass(frozen=True, slots=True)
class GenerationTimes:
    """How long a generation took.

    Attributes:
        prefill_ms: time from the prompt to its last logits.
        first_token_ms: time from requesting the first token to its text; None before it.
        decode_ms_per_token: mean time per decoded token, including sampling and detokenization; None if none was
            decoded.
        steps: inferences of prefill and decode.
        decode_steps: inferences after prefill; fewer than the decoded tokens if a grammar forced some of them.
        host_us_per_step: mean time of a step outside the runtime: inputs, bindings, copies.
    """

    prefill_ms: float
    first_token_ms: float | None
    decode_ms_per_token: float | None
    steps: int
    decode_steps: int
    host_us_per_step: float

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens per second; None if none was decoded."""
        return 1000 / self.decode_ms_per_token if self.decode_ms_per_token else None


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Statistics of a generation.

    Attributes:
        prompt_tokens: tokens of the prompt.
        generated_tokens: tokens yielded, including the end-of-sequence token.
        forced_tokens: those of them that the grammar forced, so that none was sampled.
        stop_reason: `eos`; `length`, max_new_tokens reached; `stop`, a stop text; `context`, the context is full and
            the policy is `fail`; `grammar`, the grammar allows nothing more; None while it runs or if it was
            interrupted.
        times: how long it took.
        cache: what it did with its cache.
        setup: engine and cache options.
        sampling: the parameters used.
        bundle_defaults: names of the parameters that the bundle's generation_config.json set.
        seed: reproduces a sampled generation; None if it was greedy.
        prefix: this generation's statistics of the prefix cache; None without one.
        speculation: passes, drafts and what they brought; None without speculation.
    """

    prompt_tokens: int
    generated_tokens: int
    forced_tokens: int
    stop_reason: StopReason | None
    times: GenerationTimes
    cache: CacheUse
    setup: Setup
    sampling: SamplingParams
    bundle_defaults: tuple[str, ...]
    seed: int | None
    prefix: StoreStats | None
    speculation: SpeculationStats | None


@dataclass(slots=True)
class EngineGauges:
    """What the engine held when it was noted last.

    Attributes:
        queued: requests that wait for a session.
        running: requests that take turns.
        sessions: sessions with a cache.
        session_bytes: bytes of these caches.
        evictions: sessions evicted under memory pressure.
        prefix_blocks: blocks of the prefix cache in memory.
        prefix_bytes: bytes of them.
        prefix_hits: lookups in the prefix cache that found a token.
        prefix_misses: lookups that found none.
        rejected_files: files of the prefix cache that are broken or foreign.
        busy: sessions that a request uses.
        batch_passes: passes that advanced several answers.
        batch_tokens: tokens that they brought.
    """

    queued: int = 0
    running: int = 0
    sessions: int = 0
    session_bytes: int = 0
    evictions: int = 0
    prefix_blocks: int = 0
    prefix_bytes: int = 0
    prefix_hits: int = 0
    prefix_misses: int = 0
    rejected_files: int = 0
    busy: int = 0
    batch_passes: int = 0
    batch_tokens: int = 0
