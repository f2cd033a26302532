"""Prefill, then decode."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from numpy.typing import NDArray

from edgekv.errors import UsageError
from edgekv.session.events import GenerationStats, StopReason, Token
from edgekv.session.feeder import SequenceFeeder
from edgekv.session.sampler import Sampler
from edgekv.session.text import Detokenizer, StopSequences


@dataclass(frozen=True, slots=True)
class Setup:
    """On what a generation runs, for its statistics; see `GenerationStats`."""

    engine: str
    kv_update: str
    reserve: float | None
    cache_mode: str
    kv_growth: str | None = None


class Generation(Iterator[Token]):
    """A stream of tokens. The prompt is run when the first token is asked for."""

    def __init__(
        self,
        feeder: SequenceFeeder,
        prompt: Sequence[int],
        setup: Setup,
        *,
        max_new_tokens: int,
        eos: Collection[int],
        sampler: Sampler,
        detokenizer: Detokenizer,
        stops: StopSequences,
    ) -> None:
        """Prepare a generation of a sequence that the feeder has not run yet.

        Raises:
            UsageError: `max_new_tokens` is below 1.
        """
        if max_new_tokens < 1:
            fix = "Ask for a token or more."
            raise UsageError("max_new_tokens", got=max_new_tokens, expected="at least 1", fix=fix)
        self.prompt = tuple(prompt)
        self._feeder = feeder
        self._setup = setup
        self._max_new_tokens = max_new_tokens
        self._eos = frozenset(eos)
        self._sampler = sampler
        self._detokenizer = detokenizer
        self._stops = stops
        self._generated = 0
        self._prefill_ns = 0
        self._decode_ns = 0
        self._stop_reason: StopReason | None = None
        self._abandoned = False
        self._finished = False
        self._tokens = self._run()

    def __next__(self) -> Token:
        """The next token.

        Raises:
            StopIteration: the generation has ended; `stats.stop_reason` says why.
            ValueError: its cache was handed to a later generation.
        """
        return next(self._tokens)

    def abandon(self) -> None:
        """The cache is needed for something else; whoever asks for a further token is told so."""
        self._finish()
        self._abandoned = True

    @property
    def stats(self) -> GenerationStats:
        """What was done so far."""
        done = self._feeder.done
        times = done.times
        decoded = self._generated - 1
        return GenerationStats(
            prompt_tokens=len(self.prompt),
            generated_tokens=self._generated,
            stop_reason=self._stop_reason,
            prefill_ms=self._prefill_ns / 1e6,
            decode_ms_per_token=self._decode_ns / 1e6 / decoded if decoded > 0 else None,
            steps=times.steps,
            host_us_per_step=times.host_ns / 1e3 / max(times.steps, 1),
            engine=self._setup.engine,
            kv_update=self._setup.kv_update,
            reserve=self._setup.reserve,
            cache_mode=self._setup.cache_mode,
            reused_tokens=done.reused_tokens,
            restored_tokens=done.restored_tokens,
            computed_tokens=done.computed_tokens,
            kv_growth=self._setup.kv_growth,
            kv_bytes_held=done.bytes_held,
            kv_bytes_peak=done.peak_bytes,
            kv_reallocations=done.reallocations,
            kv_bytes_copied=done.bytes_copied,
            seed=self._sampler.seed,
            evicted_tokens=done.evicted_tokens,
            requantization=done.requantization,
            prefix=self._feeder.prefix_stats,
        )

    def _run(self) -> Iterator[Token]:
        self._check_not_abandoned()
        started = perf_counter_ns()
        logits = self._feeder.feed(self.prompt)
        self._prefill_ns = perf_counter_ns() - started
        token = self._take(logits)
        yield token
        while self._stop_reason is None:
            self._check_not_abandoned()
            started = perf_counter_ns()
            token = self._take(self._feeder.feed((token.id,)))
            self._decode_ns += perf_counter_ns() - started
            yield token
        self._finish()

    def _finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._feeder.finish()

    def _take(self, logits: NDArray[Any]) -> Token:
        """Choose a token, find out whether it is the last one, and what of the text may be printed."""
        token = self._sampler(logits)
        self._generated += 1
        text = "" if token in self._eos else self._stops.push(self._detokenizer.push(token))
        self._stop_reason = self._reason(token)
        if self._stop_reason is not None:
            text += self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        return Token(token, text)

    def _reason(self, token: int) -> StopReason | None:
        if token in self._eos:
            return "eos"
        if self._stops.found:
            return "stop"
        if self._generated == self._max_new_tokens:
            return "length"
        return None if self._feeder.done.room else "context"

    def _check_not_abandoned(self) -> None:
        if self._abandoned:
            raise ValueError("generation: its cache is used by a later call of the model; finish one before the next")
