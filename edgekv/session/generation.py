"""Prefill, then decode: a stream of tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import finalize

from numpy.typing import NDArray

from edgekv.kv import CacheStats
from edgekv.session.batch import Offer
from edgekv.session.call import ChosenParams
from edgekv.session.constraint import Constraint
from edgekv.session.events import GenerationStats, Setup, StopReason, Token
from edgekv.session.graphs import StepTimes
from edgekv.session.params import SamplingParams
from edgekv.session.request import Request
from edgekv.session.sampler import Sampler
from edgekv.session.speculation import Speculation
from edgekv.session.text import Detokenizer, StopSequences
from edgekv.session.tools import ToolCall, ToolCallReader
from edgekv.session.turns import Hold, Turns

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
        request: Request,
        prompt: Sequence[int],
        setup: Setup,
        chosen: ChosenParams,
        sampler: Sampler,
        tokenizer: Tokenizer,
        eos: Collection[int],
        constraint: Constraint | None = None,
        reader: ToolCallReader | None = None,
        *,
        return_logits: bool = False,
        speculation: Speculation | None = None,
    ) -> None:
        """Claim the request's sequence, which may wait for other threads, and load the graphs.

        Args:
            turns: the model's lock.
            request: a new request.
            prompt: token ids.
            setup: copied to the statistics.
            chosen: how to sample and when to stop.
            sampler: chooses the tokens.
            tokenizer: turns them into text.
            eos: tokens that end the text.
            constraint: at the start of the text; None for free text.
            reader: of the calls of tools in the text; None if there are no tools.
            return_logits: whether tokens carry the logits of their steps.
            speculation: drafts tokens, so that a pass may bring several; None for one token a pass.

        Raises:
            MemoryBudgetError: the cache of a new sequence does not fit.
            UsageError: the sequence id is invalid, or the tokenizer fails.
            EngineError: the engine refused a graph.
        """
        assert isinstance(chosen.params, SamplingParams)
        self.prompt = tuple(prompt)
        self._turns = turns
        self._request = request
        self._setup = setup
        self._params = chosen.params
        self._bundle_defaults = chosen.bundle_defaults
        self._eos = frozenset() if self._params.ignore_eos else frozenset(eos)
        self._sampler = sampler
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopSequences(self._params.stop)
        self._return_logits = return_logits
        self._speculation = speculation
        self._constraint = constraint
        self._reader = reader
        self._generated: list[int] = []
        self._text = list(prompt)  # with the generated tokens, for drafters
        self._unfed = list(prompt)  # tokens to run in the next step
        self._forced: deque[int] = deque()  # tokens of the text that are known already
        self._forced_tokens = 0
        self._ready: NDArray[Any] | None = None  # logits after the text, from a pass of several generations
        self._prefill_steps = 0
        self._prefill_ns = 0
        self._first_ns = 0
        self._decode_ns = 0
        self._stop_reason: StopReason | None = None
        self._has_ended = False
        self._hold = Hold(turns, request.sequence, request.finish)
        with turns:
            request.prepare(len(prompt), drafts=speculation is not None)
            self._hold.claim()
            request.begin()
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
            more = self._guarded(lambda: self._request.prefill(self.prompt, most))
            self._unfed = [*self.prompt[self._request.known_tokens :]]
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
        is_forced = self._forced and not self._return_logits
        return not is_forced and self._ready is None and not self._request.has_run(self._unfed)

    def offer(self) -> Offer | None:
        """What a pass of several generations can run of this one; None if it needs no pass, or its own.

        The caller has the model's lock.

        Raises:
            ValueError: a later call has claimed its sequence.
        """
        if self._has_ended or not self._generated or self._speculation is not None or not self.needs_pass:
            return None
        self._hold.check("generation")
        self._hold.keep()
        session = self._request.batched(len(self._unfed))
        return None if session is None else Offer(session, self._unfed[0])

    def receive(self, offer: Offer, logits: NDArray[Any], before: CacheStats, times: StepTimes, ns: int) -> None:
        """Take the logits of such a pass.

        Args:
            offer: what has run.
            logits: `[V]`, its own copy.
            before: statistics of the cache before the pass.
            times: its share of the pass.
            ns: time of the whole pass.
        """
        self._request.ran(offer.token, offer.session, before, times)
        self._ready = logits
        self._decode_ns += ns

    @property
    def stop_reason(self) -> StopReason | None:
        """Why it ended; None while it runs or if it was interrupted."""
        return self._stop_reason

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools so far."""
        return () if self._reader is None else tuple(self._reader.calls)

    @property
    def stats(self) -> GenerationStats:
        """Statistics so far."""
        done = self._request.stats
        times = done.times
        decoded = len(self._generated) - 1
        per_token_ms = self._decode_ns / 1e6 / decoded if decoded > 0 else None
        return GenerationStats(
            prompt_tokens=len(self.prompt),
            generated_tokens=len(self._generated),
            stop_reason=self._stop_reason,
            prefill_ms=self._prefill_ns / 1e6,
            time_to_first_token_ms=self._first_ns / 1e6 if self._generated else None,
            decode_ms_per_token=per_token_ms,
            tokens_per_second=1000 / per_token_ms if per_token_ms else None,
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
            prefix=self._request.prefix_stats,
            sampling=self._params,
            bundle_defaults=self._bundle_defaults,
            decode_steps=times.steps - self._prefill_steps,
            forced_tokens=self._forced_tokens,
            speculation=None if self._speculation is None else self._speculation.stats,
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
            if self._speculation is not None:
                self._speculation.end()
            self._hold.end()

    def _step(self) -> Token:
        """The next token. Forced tokens need no inference; they are run together with the next step."""
        started = perf_counter_ns()
        is_first = not self._generated
        logits: NDArray[Any] | None = None
        earlier_ns = self._prefill_ns if is_first else 0  # of `prefill`
        if not self._forced or is_first or self._return_logits:
            logits = self._request.feed(self._unfed) if is_first else self._run_unfed()
            self._unfed.clear()
            if is_first:
                self._prefill_ns += perf_counter_ns() - started
                self._prefill_steps = self._request.stats.times.steps
        token = self._take(logits)
        taken_ns = perf_counter_ns() - started
        if is_first:
            self._first_ns = earlier_ns + taken_ns
        else:
            self._decode_ns += taken_ns
        if self._stop_reason is not None:
            self._end()
        return token

    def _run_unfed(self) -> NDArray[Any]:
        """The logits after the text: of a row that the last pass has run already, or of a new pass."""
        request, speculation = self._request, self._speculation
        ready, self._ready = self._ready, None
        if ready is not None:
            return ready
        if speculation is None:
            return request.feed(self._unfed)
        known = request.known_tokens
        logits = request.take(self._unfed)
        speculation.accept(request.known_tokens - known)
        if logits is not None:
            return logits
        del self._unfed[: request.known_tokens - known]
        useful = self._params.max_new_tokens - len(self._generated) - 1
        room = min(request.draft_room(len(self._unfed)), useful)
        drafts = speculation.propose(self._text, room)
        if drafts and self._constraint is not None:
            drafts = self._constraint.continued(drafts, room)
        started = perf_counter_ns()
        logits = request.verify(self._unfed, drafts) if drafts else request.feed(self._unfed)
        speculation.ran(request.ar, len(drafts), perf_counter_ns() - started)
        return logits

    def _take(self, logits: NDArray[Any] | None) -> Token:
        """Choose a token, decide whether it is the last one, and return it with the text to print."""
        started = perf_counter_ns()
        token = self._choose(logits)
        if self._speculation is not None and self._generated:
            self._speculation.chose(perf_counter_ns() - started)
        real = self._sampler.real(logits) if self._return_logits and logits is not None else None
        self._generated.append(token)
        self._text.append(token)
        self._unfed.append(token)
        known = len(self.tool_calls)
        piece = "" if token in self._eos else self._detokenizer.push(token)
        text = self._stops.push(piece if self._reader is None else self._reader.push(token, piece))
        self._stop_reason = self._reason(token)
        if self._stop_reason is not None:
            rest = self._detokenizer.flush()
            if self._reader is not None:
                rest = self._reader.push(-1, rest) + self._reader.flush()
            text += self._stops.push(rest) + self._stops.flush()
        return Token(token, text, real, self.tool_calls[known:])

    def _choose(self, logits: NDArray[Any] | None) -> int:
        """The next token: the one that is forced, otherwise the sampler's."""
        constraint = self._constraint
        if constraint is None:
            assert logits is not None
            return self._sampler(logits, self.prompt, self._generated)
        if not self._forced and not self._generated:
            self._forced.extend(constraint.forced())
        if self._forced:
            token = self._forced.popleft()
            self._forced_tokens += 1
        else:
            assert logits is not None
            token = self._sampler(logits, self.prompt, self._generated, constraint.allowed())
        constraint.push(token)
        if not self._forced:
            self._forced.extend(constraint.forced())
        return token

    def _reason(self, token: int) -> StopReason | None:
        if token in self._eos:
            return "eos"
        if self._stops.found:
            return "stop"
        if self._constraint is not None and self._constraint.is_complete:
            return "grammar"
        if len(self._generated) == self._params.max_new_tokens:
            return "length"
        room = self._request.stats.room_tokens
        return None if room is None or room >= len(self._unfed) else "context"
