"""Prefill, then decode: a stream of tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import finalize

from numpy.typing import NDArray

from edgekv.engine.batch import Offer
from edgekv.engine.call import ChosenParams
from edgekv.engine.events import GenerationStats, GenerationTimes, Setup, StopReason, Token
from edgekv.engine.graphs import StepTimes
from edgekv.engine.sequence import Sequence
from edgekv.engine.turns import Hold, Turns
from edgekv.kv import CacheStats
from edgekv.text.choice import TokenChoice
from edgekv.text.constraint import Constraint
from edgekv.text.params import SamplingParams
from edgekv.text.sampler import Sampler
from edgekv.text.stream import TextStream
from edgekv.text.tools import ToolCall, ToolCallReader

if TYPE_CHECKING:
    from tokenizers import Tokenizer

T = TypeVar("T")


class Generation(Iterator[Token]):
    """A stream of tokens. The prompt is run when the first token is requested.

    It owns its sequence until it ends, is closed (`close`, or a `with` block), or is dropped; then the computed rows
    are stored in the prefix cache, even if it was interrupted.

    Attributes:
        prompt: token ids of the prompt.
    """

    def __init__(
        self,
        turns: Turns,
        sequence: Sequence,
        setup: Setup,
        chosen: ChosenParams,
        sampler: Sampler,
        tokenizer: Tokenizer,
        eos: Collection[int],
        constraint: Constraint | None = None,
        reader: ToolCallReader | None = None,
        *,
        return_logits: bool = False,
    ) -> None:
        """Claim the sequence's session, which may wait for other threads, and load the graphs.

        Args:
            turns: the model's lock.
            sequence: a new one, with the prompt.
            setup: for the statistics.
            chosen: how to sample and when to stop.
            sampler: chooses the tokens.
            tokenizer: turns them into text.
            eos: tokens that end the text.
            constraint: at the start of the text; None for free text.
            reader: of the calls of tools in the text; None if there are no tools.
            return_logits: whether tokens carry the logits of their steps.

        Raises:
            MemoryBudgetError: the cache of a new sequence does not fit.
            UsageError: the sequence id is invalid, or the tokenizer fails.
            EngineError: the engine refused a graph.
        """
        assert isinstance(chosen.params, SamplingParams)
        self.prompt = tuple(sequence.tokens)
        self._turns = turns
        self._sequence = sequence
        self._setup = setup
        self._params = chosen.params
        self._bundle_defaults = chosen.bundle_defaults
        self._eos = frozenset() if self._params.ignore_eos else frozenset(eos)
        self._sampler = sampler
        self._choice = TokenChoice(sampler, constraint)
        self._stream = TextStream(tokenizer, self.prompt, self._params.stop, reader)
        self._return_logits = return_logits
        self._generated: list[int] = []
        self._prefill_steps = self._prefill_ns = self._first_ns = self._decode_ns = 0
        self._stop_reason: StopReason | None = None
        self._has_ended = False
        self._hold = Hold(turns, sequence.id, sequence.finish)
        with turns:
            sequence.prepare()
            self._hold.claim()
            sequence.begin()
        self._drop = finalize(self, self._hold.drop)

    def __next__(self) -> Token:
        """The next token.

        Raises:
            StopIteration: the generation has ended or was closed; `stats.stop_reason` says why.
            ValueError: a later call in the same thread has claimed its sequence.
            UsageError: the model was closed, or a logits processor left nothing to choose from.
            EngineError: the runtime failed.
        """
        with self._turns:
            if self._has_ended:
                raise StopIteration
            return self._guarded(self._step)

    def prefill(self, most: int) -> bool:
        """Run the next `most` tokens of the prompt if more are left, so that other calls can have a step in between.

        `next` runs the rest. If `most` is the largest AR of the bundle, the steps are those of a prefill at once.

        Returns:
            Whether more than `most` tokens are left.

        Raises:
            EdgeKVError: as `next`.
        """
        with self._turns:
            if self._has_ended or self._generated:
                return False
            started = perf_counter_ns()
            more = self._guarded(lambda: self._sequence.prefill(most))
            self._prefill_ns += perf_counter_ns() - started
            return more

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the generation here and store the computed rows in the prefix cache. Closing twice is harmless."""
        with self._turns:
            self._end()

    @property
    def needs_pass(self) -> bool:
        """Whether the next token needs an inference: it is not forced, and no pass has run the one before it."""
        return (self._choice.needs_logits or self._return_logits) and self._sequence.needs_pass

    def offer(self) -> Offer | None:
        """What a pass of several generations can run of this one; None if it needs no pass, or its own.

        The caller has the model's lock.

        Raises:
            ValueError: a later call has claimed its sequence.
        """
        if self._has_ended or not self._generated or not self.needs_pass:
            return None
        self._hold.check("generation")
        self._hold.keep()
        return self._sequence.offer()

    def receive(self, offer: Offer, logits: NDArray[Any], before: CacheStats, times: StepTimes, ns: int) -> None:
        """Take the logits of such a pass.

        Args:
            offer: what has run.
            logits: `[V]`, its own copy.
            before: statistics of the cache before the pass.
            times: its share of the pass.
            ns: time of the whole pass.
        """
        self._sequence.receive(offer, logits, before, times)
        self._decode_ns += ns

    @property
    def stop_reason(self) -> StopReason | None:
        """Why it ended; None while it runs or if it was interrupted."""
        return self._stop_reason

    @property
    def is_whole_text(self) -> bool:
        """Whether the text given so far is that of all tokens generated.

        Not if one of them ends a text, if a stop text was found, if it was cut within a character, or if text is
        withheld that may become either.
        """
        return self._stream.is_whole

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools so far."""
        return self._stream.tool_calls

    @property
    def stats(self) -> GenerationStats:
        """Statistics so far."""
        done = self._sequence.stats
        times, speculation = done.times, self._sequence.speculation
        decoded = len(self._generated) - 1
        return GenerationStats(
            prompt_tokens=len(self.prompt),
            generated_tokens=len(self._generated),
            forced_tokens=self._choice.forced_tokens,
            stop_reason=self._stop_reason,
            times=GenerationTimes(
                prefill_ms=self._prefill_ns / 1e6,
                first_token_ms=self._first_ns / 1e6 if self._generated else None,
                decode_ms_per_token=self._decode_ns / 1e6 / decoded if decoded > 0 else None,
                steps=times.steps,
                decode_steps=times.steps - self._prefill_steps,
                host_us_per_step=times.host_ns / 1e3 / max(times.steps, 1),
            ),
            cache=replace(done.cache),
            setup=self._setup,
            sampling=self._params,
            bundle_defaults=self._bundle_defaults,
            seed=self._sampler.seed,
            prefix=self._sequence.prefix_stats,
            speculation=None if speculation is None else speculation.stats,
        )

    def _guarded(self, work: Callable[[], T]) -> T:
        """Do some work with the cache of the call, which ends if the work fails."""
        self._hold.check("generation")
        self._hold.keep()
        try:
            return work()
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._drop.detach()
            self._hold.end()

    def _step(self) -> Token:
        """The next token. Forced tokens need no inference; they are run together with the next step."""
        started = perf_counter_ns()
        is_first = not self._generated
        logits: NDArray[Any] | None = None
        earlier_ns = self._prefill_ns if is_first else 0  # of `prefill`
        if self._choice.needs_logits or is_first or self._return_logits:
            logits = self._sequence.logits()
            if is_first:
                self._prefill_ns += perf_counter_ns() - started
                self._prefill_steps = self._sequence.stats.times.steps
        token = self._take(logits)
        taken_ns = perf_counter_ns() - started
        if is_first:
            self._first_ns = earlier_ns + taken_ns
        else:
            self._decode_ns += taken_ns
        if self._stop_reason is not None:
            self._end()
        return token

    def _take(self, logits: NDArray[Any] | None) -> Token:
        """Choose a token, decide whether it is the last one, and return it with the text to print."""
        started = perf_counter_ns()
        token = self._choice.next(logits, self.prompt, self._generated)
        self._sequence.push(token, perf_counter_ns() - started)
        real = self._sampler.real(logits) if self._return_logits and logits is not None else None
        self._generated.append(token)
        known = len(self.tool_calls)
        text = self._stream.push(token, is_text=token not in self._eos)
        self._stop_reason = self._reason(token)
        if self._stop_reason is not None:
            text += self._stream.flush(cut=self._stop_reason in ("length", "context"))
        return Token(token, text, real, self.tool_calls[known:])

    def _reason(self, token: int) -> StopReason | None:
        if token in self._eos:
            return "eos"
        if self._stream.has_stopped:
            return "stop"
        if self._choice.is_complete:
            return "grammar"
        if len(self._generated) == self._params.max_new_tokens:
            return "length"
        room = self._sequence.stats.room_tokens
        return None if room is None or room >= self._sequence.unknown_tokens else "context"
