"""A request: its tokens, the cache that it runs in, and what it has given so far."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from edgekv.engine.adapters import BoundAdapter
from edgekv.engine.beams import BeamRun
from edgekv.engine.request import POOLED, Request
from edgekv.engine.session import CacheUse, Session
from edgekv.engine.speculation import SpeculationRun
from edgekv.engine.stats import GenerationStats, GenerationTimes, Setup
from edgekv.prefix import Prefixes
from edgekv.runtime import StepTimes
from edgekv.text.output import Output, StopReason
from edgekv.text.params import SamplingParams


class Sequence:
    """A request from its arrival to its end. The engine alone changes it.

    Tokens are known once they are in a cache: run, reused or restored. A cache that was evicted in the meantime is
    recomputed from all tokens.

    Attributes:
        request: what is asked.
        cache: id of the cache that it runs in; None for the engine's own. Of a pooled one, once it has begun.
        adapter: what to compute with; None for the base model.
        prefixes: the prefix cache; None for none.
        tokens: prompt and output.
        known_tokens: how many of them are in a cache.
        output: what is generated; None if nothing is sampled.
        speculation: drafts tokens, so that a pass may bring several; None for one token a pass.
        beams: the beam search; None without one.
        unscored: tokens of the prompt that are still to be scored; None if none are wanted, or once all are.
        has_begun: whether it has a cache.
        is_prefilled: whether the next step runs all that is left of its prompt.
        has_ended: whether it has ended in any way.
        is_displaced: whether a later request took its cache over.
        session: what it runs in; None before it has one, and once that is freed.
        times: of its steps.
        room_tokens: how many more tokens can be run; None if there is no limit, or before the first step.
        ready_logits: after the text, from a pass of several sequences; None if there are none.
        drafting: the session whose last pass has drafts; None if there is none.
    """

    def __init__(
        self,
        request: Request,
        setup: Setup,
        adapter: BoundAdapter | None = None,
        prefixes: Prefixes | None = None,
        output: Output | None = None,
        speculation: SpeculationRun | None = None,
    ) -> None:
        self.request = request
        self.cache: int | None = None if request.cache == POOLED else request.cache
        self.adapter = adapter
        self.prefixes = prefixes
        self.tokens = list(request.tokens)
        self.known_tokens = 0
        self.output = output
        self.speculation = speculation
        self.has_begun = self.is_prefilled = self.has_ended = self.is_displaced = False
        self.session: Session | None = None
        self.own_use = CacheUse()
        self.times = StepTimes()
        self.room_tokens: int | None = None
        self.ready_logits: NDArray[Any] | None = None
        self.drafting: Session | None = None
        self.beams: BeamRun | None = None
        self.unscored: list[int] | None = None
        self._setup = setup
        self._prefill_steps = self._prefill_ns = self._first_ns = self._decode_ns = 0

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
    def most_tokens(self) -> int:
        """Tokens of prompt and output at most."""
        return self.prompt_tokens + (0 if self.request.params is None else self.request.params.max_new_tokens)

    @property
    def is_full(self) -> bool:
        """Whether the context has no room for a token behind the text."""
        return self.room_tokens is not None and self.room_tokens < len(self.tokens) - self.known_tokens

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

    def count_rows(self, rows: int) -> None:
        """Count rows of an open pass, which fill the context as committed ones do."""
        if self.room_tokens is not None:
            self.room_tokens -= rows

    def count_prefill(self, ns: int) -> None:
        """Count time of a part of the prompt."""
        self._prefill_ns += ns

    def count_token(self, logits_ns: int, token_ns: int) -> None:
        """Count the time of a token, and of its logits within it."""
        if self._first_ns == 0:
            self._first_ns = self._prefill_ns + token_ns
            self._prefill_ns += logits_ns
            self._prefill_steps = self.times.steps
        else:
            self._decode_ns += token_ns

    def count_pass(self, ns: int) -> None:
        """Count the time of a pass of several sequences."""
        self._decode_ns += ns

    @property
    def stats(self) -> GenerationStats:
        """Statistics so far, of a request that samples."""
        output, params, times = self.output, self.request.params, self.times
        assert output is not None and isinstance(params, SamplingParams), "it samples"
        decoded = len(output.tokens) - 1
        return GenerationStats(
            prompt_tokens=self.prompt_tokens,
            generated_tokens=len(output.tokens),
            forced_tokens=output.choice.forced_tokens,
            stop_reason=output.stop_reason,
            times=GenerationTimes(
                prefill_ms=self._prefill_ns / 1e6,
                first_token_ms=self._first_ns / 1e6 if output.tokens else None,
                decode_ms_per_token=self._decode_ns / 1e6 / decoded if decoded > 0 else None,
                steps=times.steps,
                decode_steps=times.steps - self._prefill_steps,
                host_us_per_step=times.host_ns / 1e3 / max(times.steps, 1),
            ),
            cache=replace(self.use),
            setup=self._setup,
            sampling=params,
            bundle_defaults=self.request.bundle_defaults,
            seed=output.sampler.seed,
            prefix=None if self.prefixes is None else self.prefixes.stats,
            speculation=None if self.speculation is None else self.speculation.stats,
        )
