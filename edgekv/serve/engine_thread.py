"""The thread that drives the engine: requests come in, events go to the channels of those who wait."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence as Many
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from time import perf_counter, sleep
from typing import Literal

from edgekv.engine import Engine, Event, Request, Scores, Sequence
from edgekv.serve.errors import CANCELLED, ApiError, DisconnectedError, api_error, queue_full, stopping, timed_out
from edgekv.serve.logprobs import Likelihood, TokenLogprob, token_logprob
from edgekv.serve.metrics import Metrics
from edgekv.serve.options import Limits
from edgekv.text import StopReason, Token, ToolCall

_WRITE: Callable[[int, bytes, int], int] | None = None
"""`write` of the C library, called with the interpreter's lock."""
if sys.platform != "win32":
    _WRITE = ctypes.PyDLL(None).write

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


@dataclass(frozen=True, slots=True)
class Piece:
    """One generated token.

    Attributes:
        text: to show now; may be empty.
        logprob: of the token and the most likely ones; None unless they were asked for.
        calls: of tools, which it completes.
        thoughts: of the model, to show now; None for tokens of none.
    """

    text: str
    logprob: TokenLogprob | None = None
    calls: tuple[ToolCall, ...] = ()
    thoughts: str | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens; the first one has none."""

    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer.

    Attributes:
        reason: why.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that were not computed.
        generated_tokens: tokens generated, with the end-of-sequence token.
        accepted_drafts: those of them that speculation proposed.
        rejected_drafts: proposed tokens that were wrong, or not needed.
        thought_tokens: those of the model's thoughts.
    """

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    thought_tokens: int = 0


Told = Piece | PromptLogprobs | Finished | ApiError
"""What the thread tells the coroutine that waits for an answer."""

Sink = Callable[[list[tuple[int, Told]]], bool]
"""Takes events of the answers with these indices, all of them or none; whether it did."""


class Bell:
    """Tells the readers of channels in an event loop that events have arrived, from any thread.

    asyncio's own way gives up the interpreter's lock while it writes to the loop: the loop's thread takes it, and the
    engine's waits for its work in front of every step. Here the lock is kept during the write, so that the loop's
    thread gets it once the engine computes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """For a loop that runs in this thread."""
        self._loop = loop
        self._told: deque[Channel] = deque()
        self._is_rung = False
        self._lock = threading.Lock()
        self._pipe: tuple[int, int] | None = None
        if _WRITE is not None:
            self._pipe = os.pipe()
            for each in self._pipe:
                os.set_blocking(each, False)
            loop.add_reader(self._pipe[0], self._hear)

    def ring(self, channels: Iterable[Channel]) -> None:
        """Wake the readers of channels."""
        self._told.extend(channels)
        if self._is_rung or not self._told:
            return
        self._is_rung = True
        with self._lock:  # nobody closes the descriptor meanwhile
            if self._pipe is not None and _WRITE is not None:
                _WRITE(self._pipe[1], b"\0", 1)
                return
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._wake)

    def close(self) -> None:
        """Free its descriptors, in the loop's thread."""
        with self._lock:
            pipe, self._pipe = self._pipe, None
        if pipe is not None:
            self._loop.remove_reader(pipe[0])
            for each in pipe:
                os.close(each)

    def _hear(self) -> None:
        if self._pipe is not None:
            os.read(self._pipe[0], 64)
        self._wake()

    def _wake(self) -> None:
        self._is_rung = False  # before reading: what arrives now rings again
        while self._told:
            self._told.popleft().deliver()


class Channel:
    """A queue that other threads write and one coroutine reads: `put` adds events, and a `Bell` tells the reader.

    It has the events of all answers to a request, each with the index of its answer.
    """

    def __init__(self) -> None:
        self._sink: Sink | None = None
        self._events: deque[tuple[int, Told]] = deque()
        self._arrived = asyncio.Event()
        self._is_late = False
        self._timer: asyncio.TimerHandle | None = None

    def put(self, index: int, event: Told) -> None:
        """Add an event of an answer, from any thread."""
        self._events.append((index, event))

    def deliver(self) -> None:
        """Give events to the sink or wake the reader, in the loop's thread."""
        if not self._events:  # told twice
            return
        if self._sink is not None and not self._arrived.is_set():
            events = [self._events.popleft() for _ in range(len(self._events))]
            if self._sink(events):
                return
            self._events.extendleft(reversed(events))
        self._arrived.set()

    async def take(self, within_s: float | None = None, sink: Sink | None = None) -> list[tuple[int, Told]]:
        """All events that have arrived, at least one; or none, at least once within some seconds.

        Args:
            within_s: None to wait without end.
            sink: takes events while this waits, which saves a task switch for each.

        Raises:
            DisconnectedError: the job was cancelled, as the client has gone.
        """
        if within_s is not None and self._timer is None:  # it runs on over several calls: setting it costs time
            self._timer = asyncio.get_running_loop().call_later(within_s, self._end_wait)
        taken: list[tuple[int, Told]] = []
        while True:
            self._sink = sink
            await self._arrived.wait()
            self._sink = None
            self._arrived.clear()
            while self._events:
                index, event = self._events.popleft()
                if isinstance(event, ApiError) and event.code == CANCELLED:
                    raise DisconnectedError
                taken.append((index, event))
            if taken or self._is_late:
                self._is_late = False
                return taken

    def close(self) -> None:
        """Nobody reads it any more."""
        self._sink = None
        if self._timer is not None:
            self._timer.cancel()

    def _end_wait(self) -> None:
        self._timer = None
        self._is_late = True
        self._arrived.set()


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, and what of its logits is reported.

    Attributes:
        request: for the engine.
        top_logprobs: how many of the most likely tokens to report at each position.
        scored_tokens: number of tokens at the end of the prompt whose log-probabilities are reported.
    """

    request: Request
    top_logprobs: int = 0
    scored_tokens: int = 0

    def for_answer(self, number: int) -> Wanted:
        """That of one of several answers; see `Request.for_answer`."""
        return replace(self, request=self.request.for_answer(number))


@dataclass(slots=True, eq=False)
class Ticket:
    """Who waits for an answer.

    Attributes:
        wanted: what is asked of the engine.
        channel: of the HTTP request.
        index: of the answer in it.
        deadline: when it must have ended, in seconds of `perf_counter`.
        is_cancelled: whether nobody waits for it any more; set from any thread.
        sequence: what the engine has made of it; None while it is in the inbox.
        last_token: when the last token came; before, when the request did.
        generated_tokens: that it has sent.
        thought_tokens: those of the model's thoughts.
        scored: log-probabilities of the prompt so far.
    """

    wanted: Wanted
    channel: Channel
    index: int
    deadline: float
    is_cancelled: bool = False
    sequence: Sequence | None = None
    last_token: float = field(default_factory=perf_counter)
    generated_tokens: int = 0
    thought_tokens: int = 0
    scored: list[TokenLogprob] = field(default_factory=list)

    def tell(self, event: Told) -> None:
        """Put an event into the channel, from any thread."""
        self.channel.put(self.index, event)

    def add_scores(self, scores: Scores) -> None:
        """Take the logits of the next tokens of the prompt; row i judges token i+1. The last ones are reported."""
        prompt, before = self.wanted.request.tokens, len(self.scored)
        if not before:
            self.scored.append(TokenLogprob(Likelihood(prompt[0], 0.0), is_first=True))
        for row in scores.rows:
            if len(self.scored) < len(prompt):
                self.scored.append(token_logprob(row, prompt[len(self.scored)], self.wanted.top_logprobs))
        if before < len(self.scored) == len(prompt):
            self.tell(PromptLogprobs(tuple(self.scored[-self.wanted.scored_tokens :])))

    def add_token(self, token: Token, *, is_eos: bool) -> float:
        """Send a token; the seconds since the one before, or since the arrival."""
        now = perf_counter()
        seconds, self.last_token = now - self.last_token, now
        self.generated_tokens += 1
        self.thought_tokens += token.thoughts is not None
        logprob = None
        if token.logits is not None and not is_eos:
            logprob = token_logprob(token.logits, token.id, self.wanted.top_logprobs)
        self.tell(Piece(token.text, logprob, token.tool_calls, token.thoughts))
        return seconds


class EngineThread:
    """Drives an engine in a thread of its own that alone uses it.

    Every running sequence has one pass in turn: tokens, or a piece of its prompt. A request that has no cache waits,
    first in, first out. Cancelled ones and those past their deadline end before their next pass.
    """

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics, *, batches: bool = False) -> None:
        """Start the thread.

        Args:
            engine: nobody else uses it until the thread has ended.
            limits: of sessions, queue and time.
            metrics: what is counted.
            batches: whether a pass advances all sequences that have room in it.
        """
        self._engine = engine
        engine.most_sequences, engine.shares_passes = limits.sessions, batches
        self._limits = limits
        self._metrics = metrics
        self._changed = threading.Condition()
        self._arrived: deque[Ticket] = deque()
        self._tickets: dict[Sequence, Ticket] = {}
        self._told: list[Channel] = []
        self._has_first = False  # of the tokens in `_told`
        self._bell: Bell | None = None
        self._is_closed = False
        self._mean_s = 1.0
        self._measured = (0, 0)
        self._thread = threading.Thread(target=self._drive, name="edgekv-engine", daemon=True)
        self._thread.start()

    @contextmanager
    def heard_by(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Let channels be read in a loop, in whose thread this is called, until the block ends."""
        self._bell = Bell(loop)
        try:
            yield
        finally:
            self._bell.close()

    @property
    def queued(self) -> int:
        """Answers that wait for a cache."""
        return len(self._arrived) + len(self._engine.waiting)

    @property
    def running(self) -> int:
        """Answers that take turns."""
        return len(self._engine.running)

    def submit(self, wanted: Many[Wanted], channel: Channel, deadline: float) -> list[Ticket]:
        """Queue the answers to a request, all or none, from any thread.

        Args:
            wanted: the answers.
            channel: gets their events.
            deadline: when they must have ended, in seconds of `perf_counter`.

        Raises:
            ApiError: 429, the queue has no room for them; 503, the server is stopping.
        """
        tickets = [Ticket(each, channel, index, deadline) for index, each in enumerate(wanted)]
        with self._changed:
            if self._is_closed:
                raise stopping()
            # Those that can start at once are not in the queue yet when a burst arrives.
            free = max(0, self._limits.sessions - self.running)
            waiting = max(0, self.queued - free)
            starting = max(0, free - self.queued)
            if waiting + len(tickets) - starting > self._limits.queue:
                after_s = min(60, max(1, math.ceil(self._mean_s * waiting / self._limits.sessions)))
                raise queue_full(waiting, after_s, len(tickets))
            self._arrived.extend(tickets)
            self._changed.notify()
        return tickets

    def cancel(self, tickets: Many[Ticket]) -> None:
        """End answers before their next pass, from any thread."""
        for ticket in tickets:
            ticket.is_cancelled = True
        with self._changed:
            self._changed.notify()

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
        waiting = (*self._tickets.values(), *self._arrived)
        for ticket in waiting:
            ticket.tell(stopping())
        if self._bell is not None:
            self._bell.ring([ticket.channel for ticket in waiting])

    def _drive(self) -> None:
        try:
            self._take_turns()
        finally:  # also after a bug, so that nobody waits for an engine that stands still
            with self._changed:
                self._is_closed = True
                arrived, self._arrived = self._arrived, deque()
            for ticket in (*self._tickets.values(), *arrived):
                self._fail(ticket, stopping())
            self._wake()
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
            for ticket in arrived:
                self._add(ticket)
                self._arrived.popleft()
            self._end_overdue()
            self._wake()
            for sequence, event in engine.step():
                self._pass_on(sequence, event)
            self._wake()
            if self._measured != (self.queued, self.running):
                self._measure()

    def _add(self, ticket: Ticket) -> None:
        try:
            ticket.sequence = self._engine.add(ticket.wanted.request)
        except BaseException as error:  # panics of Rust libraries are no Exception; this thread gets no signals
            self._fail(ticket, api_error(error))
        else:
            self._tickets[ticket.sequence] = ticket

    def _end_overdue(self) -> None:
        """End what nobody waits for any more, and what has taken too long."""
        now = perf_counter()
        for ticket in [*self._tickets.values()]:
            if ticket.is_cancelled:
                self._fail(ticket, ApiError(499, "the client has gone.", code=CANCELLED))
            elif now > ticket.deadline:
                self._fail(ticket, timed_out(self._limits.request_s))

    def _pass_on(self, sequence: Sequence, event: Event) -> None:
        """Send an event to who waits for it, and the end if it was the last one."""
        ticket = self._tickets.get(sequence)
        if ticket is None:  # it has failed in the same step
            return
        self._told.append(ticket.channel)
        if isinstance(event, BaseException):
            self._fail(ticket, api_error(event))
            return
        if isinstance(event, Scores):
            ticket.add_scores(event)
        elif isinstance(event, Token):
            output = sequence.output
            assert output is not None, "it gives tokens"
            is_last = sequence.has_ended and ticket.generated_tokens + 1 == len(output.tokens)
            seconds = ticket.add_token(event, is_eos=is_last and output.stop_reason == "eos")
            is_first = ticket.generated_tokens == 1
            self._has_first |= is_first
            self._metrics.count_token(seconds, is_first=is_first)
            if not is_last:
                return
        if sequence.has_ended:
            self._finish(ticket, sequence)

    def _finish(self, ticket: Ticket, sequence: Sequence) -> None:
        del self._tickets[sequence]
        self._metrics.count_finished(sequence)
        request_s = self._limits.request_s
        spent = perf_counter() - (ticket.deadline - request_s)
        self._mean_s += 0.1 * (spent - self._mean_s)
        self._measure()
        if sequence.output is None:
            ticket.tell(Finished("length", sequence.prompt_tokens, 0, 0))
            return
        stats = sequence.stats
        drafts = stats.speculation
        accepted, rejected = (0, 0) if drafts is None else (drafts.accepted, drafts.proposed - drafts.accepted)
        reason, cached, generated = _REASONS[stats.stop_reason], stats.cache.reused_tokens, stats.generated_tokens
        thoughts = ticket.thought_tokens
        ticket.tell(Finished(reason, stats.prompt_tokens, cached, generated, accepted, rejected, thoughts))

    def _fail(self, ticket: Ticket, error: ApiError) -> None:
        if (sequence := ticket.sequence) is not None:
            self._tickets.pop(sequence, None)
            try:
                self._engine.abort(sequence)
            except Exception:  # such as a full disk of the prefix cache: the first error is the one to tell
                traceback.print_exc()
        self._metrics.count_failed(sequence, error)
        self._measure()
        ticket.tell(error)
        self._told.append(ticket.channel)

    def _wake(self) -> None:
        """Wake those who got an event since the last call, and let first tokens go out at once."""
        if self._told and self._bell is not None:
            self._bell.ring(self._told)
            if self._has_first:
                sleep(_GIVE_WAY_S)
        self._told.clear()
        self._has_first = False

    def _measure(self) -> None:
        """Note what the engine holds: other threads must not look at it."""
        self._measured = self.queued, self.running
        self._metrics.note(*self._measured, self._engine)
