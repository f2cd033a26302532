"""What a generation yields, and what is known of it at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgekv.kv import Requantization
from edgekv.prefix import StoreStats
from edgekv.session.params import SamplingParams

StopReason = Literal["eos", "length", "stop", "context"]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        id: in the vocabulary.
        text: what can be printed now. Empty while a character or a possible stop text is incomplete; the last token
            brings all that was held back.
        logits: of the step, `[V]` in float32, before any processor; None unless they were asked for.
    """

    id: int
    text: str
    logits: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Setup:
    """On what a generation runs, for its statistics; see `GenerationStats`."""

    engine: str
    kv_update: str
    reserve: float | None
    cache_mode: str
    kv_growth: str | None = None


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What a generation did.

    Attributes:
        prompt_tokens: tokens of the prompt.
        generated_tokens: tokens yielded, the end-of-sequence token included.
        stop_reason: `eos`; `length`, max_new_tokens reached; `stop`, a stop text; `context`, the context is full and
            the policy is `fail`; None while it runs, and if it was broken off.
        prefill_ms: time from the prompt to its logits.
        time_to_first_token_ms: time from asking for the first token to its text; None before it.
        decode_ms_per_token: mean time of a decoded token, sampling and text included; None if none was decoded.
        tokens_per_second: decoded tokens per second; None if none was decoded.
        steps: inferences of prefill and decode.
        host_us_per_step: mean time of a step outside of the runtime's own run: inputs, bindings, copies.
        engine: where the graphs ran.
        kv_update: update strategy of the cache.
        reserve: memory of `pointer-shift` in units of S-1 rows; None for other strategies.
        cache_mode: which sequences are kept from step to step; see `edgekv.session`.
        reused_tokens: prompt tokens that were not run, because the sequence's cache held them or they were restored.
        restored_tokens: those of them that were copied from the prefix cache.
        computed_tokens: tokens run through the graphs, those included that were run again.
        kv_growth: how the cache's memory grows; None if all of it is allocated at once.
        kv_bytes_held: bytes allocated for the cache.
        kv_bytes_peak: the most that ever were since the cache was made.
        kv_reallocations: how often the memory of a layer was replaced by a larger one during this generation.
        kv_bytes_copied: bytes that the cache copied during this generation.
        seed: reproduces a sampled generation; None if it was greedy.
        evicted_tokens: tokens that the policies `sinks` or `keydiff` dropped from the cache during this generation.
        requantization: the error of keys that moved to other positions, in the cache of the last step since it was
            made; None if the policy moves none, and before the first token.
        prefix: what this generation did with the prefix cache, and what that holds now; None without one.
        sampling: the parameters used.
        bundle_defaults: names of the parameters that the bundle's generation_config.json set.
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
