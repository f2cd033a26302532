"""The tokens that a generation yields, and its statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgekv.kv import Requantization
from edgekv.prefix import StoreStats
from edgekv.runtime import HtpOptions
from edgekv.session.params import SamplingParams
from edgekv.session.speculation import SpeculationStats
from edgekv.session.tools import ToolCall

StopReason = Literal["eos", "length", "stop", "context", "grammar"]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        id: in the vocabulary.
        text: text to print now. Empty while a character or a possible stop text is incomplete; the last token includes
            all text withheld so far.
        logits: of the step, `[V]` in float32, before any processor; None unless they were asked for.
        tool_calls: the calls that this token completes; their notation is not part of any `text`.
    """

    id: int
    text: str
    logits: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Setup:
    """Engine and cache options of a generation, for its statistics; see `GenerationStats`."""

    engine: str
    kv_update: str
    reserve: float | None
    cache_mode: str
    kv_growth: str | None = None
    htp: HtpOptions | None = None


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Statistics of a generation.

    Attributes:
        prompt_tokens: tokens of the prompt.
        generated_tokens: tokens yielded, including the end-of-sequence token.
        stop_reason: `eos`; `length`, max_new_tokens reached; `stop`, a stop text; `context`, the context is full and
            the policy is `fail`; `grammar`, the grammar allows nothing more; None while it runs or if it was
            interrupted.
        prefill_ms: time from the prompt to its last logits.
        time_to_first_token_ms: time from requesting the first token to its text; None before it.
        decode_ms_per_token: mean time per decoded token, including sampling and detokenization; None if none was
            decoded.
        tokens_per_second: decoded tokens per second; None if none was decoded.
        steps: inferences of prefill and decode.
        host_us_per_step: mean time of a step outside the runtime: inputs, bindings, copies.
        engine: the engine that ran the graphs.
        htp: the options of the engine `htp`; None with another engine.
        kv_update: update strategy of the cache.
        reserve: memory of `pointer-shift` in units of S-1 rows; None for other strategies.
        cache_mode: which sequences are kept from step to step; see `edgekv.session`.
        reused_tokens: prompt tokens that were not run: already in the sequence's cache, or restored.
        restored_tokens: the part of them that was copied from the prefix cache.
        computed_tokens: tokens run through the graphs, including those computed again.
        kv_growth: how the cache's memory grows; None if all of it is allocated at the start.
        kv_bytes_held: bytes allocated for the cache.
        kv_bytes_peak: maximum of `kv_bytes_held` since the cache was created.
        kv_reallocations: how often the memory of a layer was replaced by a larger one during this generation.
        kv_bytes_copied: bytes that the cache copied during this generation.
        seed: reproduces a sampled generation; None if it was greedy.
        evicted_tokens: tokens that the policies `sinks` or `keydiff` dropped from the cache during this generation.
        requantization: rounding error of re-rotated keys in the cache of the last step, since its creation; None if the
            policy moves no keys, and before the first token.
        prefix: this generation's statistics of the prefix cache; None without one.
        sampling: the parameters used.
        bundle_defaults: names of the parameters that the bundle's generation_config.json set.
        decode_steps: inferences after prefill; fewer than the decoded tokens if a grammar forced some of them.
        forced_tokens: generated tokens that the grammar forced, so that none was sampled.
        speculation: passes, drafts and what they brought; None without speculation.
    """

    prompt_tokens: int
    generated_tokens: int
    stop_reason: StopReason | None
    prefill_ms: float
    time_to_first_token_ms: float | None
    decode_ms_per_token: float | None
    tokens_per_second: float | None
    steps: int
    host_us_per_step: float
    engine: str
    kv_update: str
    reserve: float | None
    cache_mode: str
    reused_tokens: int
    restored_tokens: int
    computed_tokens: int
    kv_growth: str | None
    kv_bytes_held: int
    kv_bytes_peak: int
    kv_reallocations: int
    kv_bytes_copied: int
    seed: int | None
    evicted_tokens: int
    requantization: Requantization | None
    prefix: StoreStats | None
    sampling: SamplingParams
    bundle_defaults: tuple[str, ...]
    decode_steps: int
    forced_tokens: int
    speculation: SpeculationStats | None
    htp: HtpOptions | None
