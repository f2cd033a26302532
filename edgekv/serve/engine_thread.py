"""The thread that drives the engine: requests come in, events go to who waits for them."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence as Many
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from time import perf_counter, sleep
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgekv.engine import Engine, Event, Request, Scores, Sequence
from edgekv.serve.errors import ApiError, api_error, queue_full, stopping
from edgekv.serve.logprobs import Likelihood, TokenLogprob, token_logprob
from edgekv.serve.metrics import Metrics
from edgekv.serve.options import Limits
from edgekv.text import StopReason, Token

_C = None if sys.platform == "win32" else ctypes.PyDLL(None)
"""The C library, called with the interpreter's lock."""

_GIVE_WAY_S = 50e-6
"""How long the thread lets that of the connections send first tokens; later ones are sent while the engine computes."""

FinishReason = Literal["stop", "length", "tool_calls"]

_REASONS: dict[StopReason | None, FinishReason] = {
    "eos": "stop",
    "stop": "stop",
    "grammar": "stop",
    "length": "length",
    "context": "length",
    None: "stop",
}

ServerEvent = Token | TokenLogprob | tuple[TokenLogprob, ...] | ApiError | FinishReason
"""What the thread tells who waits for an answer: a token; before it, if it was asked for, its log-probability; those of
the prompt, of which the first is none; an error, or why the answer has ended."""
Sink = Callable[[list[tuple[int, ServerEvent]]], bool]
"""Takes events of the answers with these indices, all of them or none; whether it did."""


class AnswerQueue:
    """Events of the answers to a request, each with the index of its answer, in the event loop's thread."""

    def __init__(self) -> None:
        self._sink: Sink | None = None
        self._events: list[tuple[int, ServerEvent]] = []
        self._arrived = asyncio.Event()
        self._failure: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    def put(self, index: int, event: ServerEvent) -> None:
        """Add an event of an answer; `deliver` follows."""
        self._events.append((index, event))

    def deliver(self) -> None:
        """Give what was put to the sink, or wake the reader."""
        if self._sink is not None and not self._arrived.is_set():
            try:
                if self._sink(self._events):
                    self._events = []
                    return
            except Exception as error:  # the reader's: nobody else would end the request
                self._failure = error
        self._arrived.set()

    async def take(self, within_s: float | None = None, sink: Sink | None = None) -> list[tuple[int, ServerEvent]]:
        """All events that have arrived; none only if `wake` was called, or once within some seconds.

        Args:
            within_s: None to wait without end.
            sink: takes events while this waits, which saves a task switch for each.

        Raises:
            Exception: as the sink.
        """
        if within_s is not None and self._timer is None:  # it runs on over several calls: setting it costs time
            self._timer = asyncio.get_running_loop().call_later(within_s, self._end_wait)
        self._sink = sink
        await self._arrived.wait()
        self._sink = None
        self._arrived.clear()
        if self._failure is not None:
            raise self._failure
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        """Let the reader look, though nothing has arrived."""
        self._arrived.set()

    def close(self) -> None:
        """Nobody reads it any more."""
        self._sink = None
        if self._timer is not None:
            self._timer.cancel()

    def _end_wait(self) -> None:
        self._timer = None
        self._arrived.set()


@dataclass(slots=True, eq=False)
class PendingAnswer:
    """An answer that somebody waits for.

    The engine's thread writes all but `error`; once it has ended, all others may read it.

    Attributes:
        request: what is asked of the engine.
        index: of the answer in the HTTP request.
        queue: gets its events.
        top_logprobs: how many of the most likely tokens to report at each position.
        began: when it was queued, in seconds of `perf_counter`.
        error: ends it before its next pass; None while somebody waits for it. Set from any thread.
        sequence: what the engine has made of it; None until it has.
        has_ended: whether no event follows.
        reason: why it ended; None before, and after an error.
        last_token: when the last token came; before, when it was queued.
        generated_tokens: tokens sent, with the end-of-sequence token.
        thought_tokens: those of the model's thoughts.
        cached_tokens: tokens of the prompt that were not computed, once it has ended.
        accepted_drafts: generated tokens that speculation proposed, once it has ended.
        rejected_drafts: proposed tokens that were wrong, or not needed.
        scored: log-probabilities of the prompt so far.
        rows: what came of the tokens of a text, of a model that writes none.
        gives_rows: whether those are wanted, not log-probabilities.
    """

    request: Request
    index: int
    queue: AnswerQueue
    top_logprobs: int = 0
    began: float = field(default_factory=perf_counter)
    error: ApiError | None = None
    sequence: Sequence | None = None
    has_ended: bool = False
    reason: FinishReason | None = None
    last_token: float = 0.0
    generated_tokens: int = 0
    thought_tokens: int = 0
    cached_tokens: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    scored: list[TokenLogprob] = field(default_factory=list)
    rows: list[NDArray[np.float32]] = field(default_factory=list)
    gives_rows: bool = False

    def __post_init__(self) -> None:
        self.last_token = self.began

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.tokens)

    def add_scores(self, scores: Scores) -> bool:
        """Take the logits of the next tokens of the prompt; row i judges token i+1. Whether they were the last."""
        prompt, before = self.request.tokens, len(self.scored)
        if not before:
            self.scored.append(TokenLogprob(Likelihood(prompt[0], 0.0), is_first=True))
        for row in scores.rows:
            if len(self.scored) < len(prompt):
                self.scored.append(token_logprob(row, prompt[len(self.scored)], self.top_logprobs))
        return before < len(self.scored) == len(prompt)


class LoopWaker:
    """Brings events to an event loop, from any thread.

    asyncio's own way gives up the interpreter's lock while it writes to the loop: the loop's thread takes it, and the
    engine's waits for its work in front of every step. Here the lock is kept during the write, so that the loop's
    thread gets it once the engine computes; and during the read, so that it need not get it twice.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """For a loop that runs in this thread."""
        self._loop = loop
        self._events: deque[tuple[PendingAnswer, ServerEvent]] = deque()
        self._is_woken = False
        self._lock = threading.Lock()
        self._pipe: tuple[int, int] | None = None
        self._buffer = ctypes.create_string_buffer(64)
        if _C is not None:
            self._pipe = os.pipe()
            for descriptor in self._pipe:
                os.set_blocking(descriptor, False)
            loop.add_reader(self._pipe[0], self._read)

    def send(self, events: Many[tuple[PendingAnswer, ServerEvent]]) -> None:
        """Put events into the queues of their answers, in the loop's thread."""
        self._events.extend(events)
        if self._is_woken or not self._events:
            return
        self._is_woken = True
        with self._lock:  # nobody closes the descriptor meanwhile
            if self._pipe is not None and _C is not None:
                _C.write(self._pipe[1], b"\0", 1)
                return
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._deliver)

    def close(self) -> None:
        """Free its descriptors, in the loop's thread."""
        with self._lock:
            pipe, self._pipe = self._pipe, None
        if pipe is not None:
            self._loop.remove_reader(pipe[0])
            for descriptor in pipe:
                os.close(descriptor)

    def _read(self) -> None:
        if self._pipe is not None and _C is not None:
            _C.read(self._pipe[0], self._buffer, len(self._buffer))
        self._deliver()

    def _deliver(self) -> None:
        self._is_woken = False  # before reading: what arrives now wakes again
        events, queues = self._events, dict[AnswerQueue, None]()
        while events:
            answer, event = events.popleft()
            answer.queue.put(answer.index, event)
            queues[answer.queue] = None
        for queue in queues:
            queue.deliver()


class EngineThread:
    """Drives an engine in a thread of its own that alone uses it.

    Every running sequence has one pass in turn: tokens, or a piece of its prompt. A request that has no cache waits,
    first in, first out. Those that nobody waits for any more end before their next pass.
    """

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics, *, batches: bool = False) -> None:
        """Start the thread.

        Args:
            engine: nobody else uses it until the thread has ended.
            limits: of sessions and queue.
            metrics: what is counted.
            batches: whether a pass advances all sequences that have room in it.
        """
        self._engine = engine
        engine.max_sequences, engine.shares_passes = limits.sessions, batches
        self._limits = limits
        self._metrics = metrics
        self._changed = threading.Condition()
        self._arrived: deque[PendingAnswer] = deque()
        self._answers: dict[Sequence, PendingAnswer] = {}
        self._events: list[tuple[PendingAnswer, ServerEvent]] = []  # of the current step
        self._has_first = False  # whether one of them is a first token
        self._has_errors = False  # whether an answer was cancelled
        self._waker: LoopWaker | None = None
        self._is_closed = False
        self._mean_s = 1.0
        self._measured = (0, 0)
        self._thread = threading.Thread(target=self._drive, name="edgekv-engine", daemon=True)
        self._thread.start()

    @contextmanager
    def heard_by(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Send events to a loop, in whose thread this is called, until the block ends."""
        self._waker = LoopWaker(loop)
        try:
            yield
        finally:
            self._waker.close()

    @property
    def queued(self) -> int:
        """Answers that wait for a cache."""
        return len(self._arrived) + len(self._engine.waiting)

    @property
    def running(self) -> int:
        """Answers that take turns."""
        return len(self._engine.running)

    def submit(self, answers: Many[PendingAnswer]) -> None:
        """Queue the answers to a request, all or none, from any thread; `wake` follows.

        Raises:
            ApiError: 429, the queue has no room for them; 503, the server is stopping.
        """
        with self._changed:
            if self._is_closed:
                raise stopping()
            # Those that can start at once are not in the queue yet when a burst arrives.
            free = max(0, self._limits.sessions - self.running)
            waiting = max(0, self.queued - free)
            starting = max(0, free - self.queued)
            if waiting + len(answers) - starting > self._limits.queue:
                after_s = min(60, max(1, math.ceil(self._mean_s * waiting / self._limits.sessions)))
                raise queue_full(waiting, after_s, len(answers))
            self._arrived.extend(answers)

    def wake(self) -> None:
        """Let the thread begin what was submitted, if it sleeps; from any thread."""
        with self._changed:
            self._changed.notify()

    def cancel(self, answers: Many[PendingAnswer], error: ApiError) -> None:
        """End those answers that have not ended before their next pass, from any thread."""
        for answer in answers:
            if not answer.has_ended and answer.error is None:
                answer.error = error
                self._has_errors = True
        if self._has_errors:
            self.wake()

    def stop(self) -> None:
        """End all answers and the thread after its current step, from any thread; the engine stays open."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Whether the thread has ended, or does so soon."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """End the answers of a thread that does not end, from another thread."""
        if self._waker is not None:
            self._waker.send([(answer, stopping()) for answer in (*self._answers.values(), *self._arrived)])

    def _drive(self) -> None:
        try:
            self._take_turns()
        finally:  # also after a bug, so that nobody waits for an engine that stands still
            with self._changed:
                self._is_closed = True
                arrived, self._arrived = self._arrived, deque()
            for answer in (*self._answers.values(), *arrived):
                self._fail(answer, stopping())
            self._send()
            self._engine.pool.forget_idle()
            self._measure()

    def _take_turns(self) -> None:
        engine = self._engine
        while True:
            with self._changed:
                while not (self._arrived or engine.waiting or engine.running or self._is_closed):
                    self._changed.wait()
                if self._is_closed:
                    return
                arrived = [*self._arrived]
            for answer in arrived:
                self._add(answer)
                self._arrived.popleft()
            if self._has_errors:
                self._end_cancelled()
            self._send()
            for sequence, event in engine.step():
                self._pass_on(sequence, event)
            self._send()
            if self._measured != (self.queued, self.running):
                self._measure()

    def _add(self, answer: PendingAnswer) -> None:
        try:
            answer.sequence = self._engine.add(answer.request)
        except BaseException as error:  # panics of Rust libraries are no Exception; this thread gets no signals
            self._fail(answer, api_error(error))
        else:
            self._answers[answer.sequence] = answer

    def _end_cancelled(self) -> None:
        """End what nobody waits for any more."""
        self._has_errors = False  # before looking: what is cancelled now is looked for again
        for answer in [*self._answers.values()]:
            if answer.error is not None:
                self._fail(answer, answer.error)

    def _pass_on(self, sequence: Sequence, event: Event) -> None:
        """Send an event to who waits for it, and the end if it was the last one."""
        answer = self._answers.get(sequence)
        if answer is None:  # it has failed in the same step
            return
        if isinstance(event, Token):
            output = sequence.output
            assert output is not None, "it gives tokens"
            is_last = sequence.has_ended and answer.generated_tokens + 1 == len(output.tokens)
            self._add_token(answer, event, is_eos=is_last and output.stop_reason == "eos")
            if not is_last:
                return
        elif isinstance(event, BaseException):
            self._fail(answer, api_error(event))
            return
        elif isinstance(event, Scores) and answer.gives_rows:
            answer.rows.append(event.rows)
        elif isinstance(event, Scores) and answer.add_scores(event):
            self._events.append((answer, tuple(answer.scored)))
        if sequence.has_ended:
            self._finish(answer, sequence)

    def _add_token(self, answer: PendingAnswer, token: Token, *, is_eos: bool) -> None:
        now = perf_counter()
        answer.generated_tokens += 1
        answer.thought_tokens += token.thoughts is not None
        is_first = answer.generated_tokens == 1
        self._has_first |= is_first
        self._metrics.count_token(now - answer.last_token, is_first=is_first)
        answer.last_token = now
        if token.logits is not None:
            if not is_eos:  # it has no text
                self._events.append((answer, token_logprob(token.logits, token.id, answer.top_logprobs)))
            token = replace(token, logits=None)  # of the size of the vocabulary
        self._events.append((answer, token))

    def _finish(self, answer: PendingAnswer, sequence: Sequence) -> None:
        del self._answers[sequence]
        self._metrics.finished += 1
        self._count_prompt(sequence)
        self._mean_s += 0.1 * (perf_counter() - answer.began - self._mean_s)
        self._measure()
        reason: FinishReason = "length"
        if sequence.output is not None:
            stats = sequence.stats
            reason, answer.cached_tokens = _REASONS[stats.stop_reason], stats.cache.reused_tokens
            if (drafts := stats.speculation) is not None:
                answer.accepted_drafts, answer.rejected_drafts = drafts.accepted, drafts.proposed - drafts.accepted
        elif sequence.request.only_reads:
            answer.cached_tokens = sequence.use.reused_tokens
        answer.reason, answer.has_ended = reason, True
        self._events.append((answer, reason))

    def _fail(self, answer: PendingAnswer, error: ApiError) -> None:
        if (sequence := answer.sequence) is not None:
            self._answers.pop(sequence, None)
            try:
                self._engine.abort(sequence)
            except Exception:  # such as a full disk of the prefix cache: the first error is the one to tell
                traceback.print_exc()
            self._count_prompt(sequence)
        self._metrics.count_failed(error)
        self._measure()
        answer.has_ended = True
        self._events.append((answer, error))

    def _send(self) -> None:
        """Send the events since the last call, and let first tokens go out at once."""
        if self._events and self._waker is not None:
            self._waker.send(self._events)
            if self._has_first:
                sleep(_GIVE_WAY_S)
        self._events.clear()
        self._has_first = False

    def _count_prompt(self, sequence: Sequence) -> None:
        if sequence.request.only_reads or (sequence.output is not None and sequence.output.tokens):
            use, run = sequence.use, sequence.speculation
            self._metrics.count_prompt(sequence.request.read_tokens, use.reused_tokens, use.restored_tokens)
            if run is not None:
                self._metrics.count_drafts(run.stats)

    def _measure(self) -> None:
        """Note what the engine holds: other threads must not look at it."""
        gauges = self._engine.gauges()
        gauges.queued = self.queued
        self._measured = gauges.queued, gauges.running
        self._metrics.gauges = gauges
