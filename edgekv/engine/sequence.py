"""A request on its way: its tokens, the cache that it runs in, and what it has given so far."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from threading import Thread
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from edgekv.engine.adapters import BoundAdapter
from edgekv.engine.beams import BeamResult, BeamRun
from edgekv.engine.request import DEFAULT_CACHE, Request
from edgekv.engine.session import CacheUse, Session
from edgekv.engine.speculation import SpeculationRun
from edgekv.engine.stats import GenerationStats, GenerationTimes, Setup
from edgekv.prefix import Prefixes
from edgekv.runtime import StepTimes
from edgekv.text.output import Output, StopReason, Token
from edgekv.text.params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The logits after the next tokens of a prompt or of its branches, first those of the sink; or after its last one.

    Attributes:
        rows: `[rows, V]` in float32.
    """

    rows: NDArray[np.float32]


Event = Token | Scores | BeamResult | BaseException
"""What a step brings a sequence; an exception ends it."""


class Status(IntEnum):
    """Where a sequence is on its way; one from `ENDED` on runs no more."""

    WAITING = 0
    PREFILLING = 1
    DECODING = 2
    ENDED = 3
    DISPLACED = 4


@dataclass(slots=True, eq=False)
class Sequence:
    """A request from its arrival to its end. Its engine decides when it runs.

    Tokens are known once they are in a cache: run, reused or restored. A cache that was evicted in the meantime is
    recomputed from all tokens.

    Attributes:
        request: what is asked.
        setup: for the statistics.
        adapter: what to compute with; None for the base model.
        prefixes: the prefix cache; None for none.
        output: what is generated; None if nothing is sampled.
        speculation: drafts tokens, so that a pass may bring several; None for one token a pass.
        beams: the beam search; None without one.
        status: `DECODING` once the next step runs all that is left of its prompt; `DISPLACED` if a later request took
            its cache over.
        cache: id of the cache that it runs in, the default one if nothing is generated; None until the pool has chosen
            one.
        tokens: prompt and output.
        known_tokens: how many of them are in a cache.
        unscored: tokens of the prompt that are still to be scored; None if none are wanted, or once all are.
        session: what it runs in; None before it has one, and once that is freed.
        times: of its steps.
        room_tokens: how many more tokens can be run; None if there is no limit, or before the first step.
        ready_logits: after the text, from a pass of several sequences; None if there are none.
        drafting: the session whose last pass has drafts; None if there is none.
        thread: of its last step; None if the server's thread drives it.
        owner: ends it when it is dropped; None as for `thread`.
    """

    request: Request
    setup: Setup
    adapter: BoundAdapter | None = None
    prefixes: Prefixes | None = None
    output: Output | None = None
    speculation: SpeculationRun | None = None
    beams: BeamRun | None = None
    status: Status = Status.WAITING
    cache: int | None = field(init=False)
    tokens: list[int] = field(init=False)
    known_tokens: int = 0
    unscored: list[int] | None = None
    session: Session | None = None
    own_use: CacheUse = field(default_factory=CacheUse)
    times: StepTimes = field(default_factory=StepTimes)
    room_tokens: int | None = None
    ready_logits: NDArray[Any] | None = None
    drafting: Session | None = None
    thread: Thread | None = None
    owner: ref[object] | None = None
    prefill_steps: int = 0
    prefill_ns: int = 0
    first_ns: int = 0
    decode_ns: int = 0

    def __post_init__(self) -> None:
        self.cache = self.request.cache if self.request.is_pooled else DEFAULT_CACHE
        self.tokens = [*self.request.tokens]

    @property
    def has_ended(self) -> bool:
        """Whether it has ended in any way."""
        return self.status >= Status.ENDED

    @property
    def use(self) -> CacheUse:
        """What it did with caches so far."""
        if self.session is not None and self.session.writer is self:
            self.session.count()
        return self.own_use

    @property
    def unknown(self) -> list[int]:
        """The tokens that the next step has to run."""
        return self.tokens[self.known_tokens :]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.tokens)

    @property
    def prefilled_tokens(self) -> int:
        """Tokens of the prompt that its cache has by now; another thread may ask while they run."""
        session = self.session
        held = 0 if session is None or session.writer is not self else len(session.tokens)
        return min(held, self.prompt_tokens)

    @property
    def is_reading(self) -> bool:
        """Whether it has brought nothing of its prompt yet, in a cache that others may share prefixes with."""
        return not self.output.tokens if self.output is not None else self.request.only_reads and not self.has_ended

    @property
    def max_tokens(self) -> int:
        """Tokens of prompt and output at most."""
        return self.prompt_tokens + (0 if self.request.params is None else self.request.params.max_new_tokens)

    @property
    def stop_reason(self) -> StopReason | None:
        """Why its output ended; None while it runs or if it was interrupted."""
        return None if self.output is None else self.output.stop_reason

    @property
    def needs_pass(self) -> bool:
        """Whether the next token needs an inference: it is not forced, and no pass has run the one before it."""
        if self.output is None or not self.output.needs_logits or self.ready_logits is not None:
            return False
        return self.drafting is None or not self.drafting.has_run(self.unknown)

    @property
    def stats(self) -> GenerationStats:
        """Statistics so far, of a request that samples."""
        output, params, times = self.output, self.request.params, self.times
        assert output is not None and isinstance(params, SamplingParams), "it samples"
        decoded = len(output.tokens) - 1
        return GenerationStats(
            prompt_tokens=self.prompt_tokens,
            generated_tokens=len(output.tokens),
            forced_tokens=output.forced_tokens,
            stop_reason=output.stop_reason,
            times=GenerationTimes(
                prefill_ms=self.prefill_ns / 1e6,
                first_token_ms=self.first_ns / 1e6 if output.tokens else None,
                decode_ms_per_token=self.decode_ns / 1e6 / decoded if decoded > 0 else None,
                steps=times.steps,
                decode_steps=times.steps - self.prefill_steps,
                host_us_per_step=times.host_ns / 1e3 / max(times.steps, 1),
            ),
            cache=replace(self.use),
            setup=self.setup,
            sampling=params,
            bundle_defaults=self.request.bundle_defaults,
            seed=output.sampler.seed,
            prefix=None if self.prefixes is None else self.prefixes.stats,
            speculation=None if self.speculation is None else replace(self.speculation.stats),
        )
