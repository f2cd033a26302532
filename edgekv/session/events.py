"""What a generation yields, and what is known of it at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgekv.kv import Requantization
from edgekv.prefix import StoreStats

StopReason = Literal["eos", "length", "stop", "context"]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        id: in the vocabulary.
        text: what may be printed now. Empty while a character or a possible stop sequence is incomplete; the
            last token brings all that was held back.
    """

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What a generation did.

    Attributes:
        prompt_tokens: tokens of the prompt.
        generated_tokens: tokens yielded, the end-of-sequence token included.
        stop_reason: `eos`; `length`, max_new_tokens reached; `stop`, a stop sequence; `context`, the context
            is full and the policy is `fail`; None while it goes on.
        prefill_ms: time from the prompt to its logits.
        decode_ms_per_token: mean time of a decoded token, sampling and text included; None if none was decoded.
        steps: inferences of prefill and decode.
        host_us_per_step: mean time of a step outside of the runtime's own run: inputs, bindings, copies.
        engine: where the graphs ran.
        kv_update: update strategy of the cache.
        reserve: memory of `pointer-shift` in units of S-1 rows; None for other strategies.
        cache_mode: what is kept from step to step; see `edgekv.session`.
        reused_tokens: tokens of the prompt that were not run, because the sequence's cache held them or they were
            restored.
        restored_tokens: those of them that were copied from the store of prefixes.
        computed_tokens: tokens run through the graphs, those included that were computed anew.
        kv_growth: how the cache's memory grows; None if all of it is allocated at once.
        kv_bytes_held: bytes allocated for the cache.
        kv_bytes_peak: the most that ever were since the cache was made.
        kv_reallocations: how often the memory of a layer was replaced by a larger one during this generation.
        kv_bytes_copied: bytes that the cache copied during this generation.
        seed: reproduces a sampled generation; None if it was greedy.
        evicted_tokens: tokens that left the cache during this generation because the policies `sinks` or `keydiff`
            chose them.
        requantization: what moving keys to other positions has cost in the cache of the last step, since that cache
            was made; None if the policy moves none, and before the first token.
        prefix: what this generation did with the store of prefixes, and what that holds now; None without one.
    """

    prompt_tokens: int
    generated_tokens: int
    stop_reason: StopReason | None
    prefill_ms: float
    decode_ms_per_token: float | None
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
