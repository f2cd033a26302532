"""The answers to a request: from the engine's events to what the client gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.embed import packed
from edgekv.engine import Request
from edgekv.engine.request import pieces
from edgekv.serve.engine_thread import AnswerQueue, FinishReason, PendingAnswer, ServerEvent
from edgekv.serve.errors import ApiError, DisconnectedError
from edgekv.serve.http import WAITING, Exchange
from edgekv.serve.logprobs import TokenLogprob
from edgekv.serve.service import Service
from edgekv.text import Token

PREFILL_S = 1.0
"""Between comments that say how much of a prompt has run."""
WAITING_S = 15.0
"""Proxies close a connection that is silent for a minute."""


class PromptDetails(msgspec.Struct, frozen=True):
    """Part of `usage`; cached tokens were not computed."""

    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct, frozen=True):
    """Part of `usage`: tokens of thoughts, drafts that are part of the answer, and drafts that are not."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """`usage` of completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails

    @classmethod
    def of(cls, answers: Sequence[PendingAnswer], n: int) -> Usage:
        """Of the answers to a request: the tokens of all answers, and each prompt once.

        Args:
            answers: that have ended, with the `n` of a prompt side by side.
            n: answers to each prompt.
        """
        firsts = answers[::n]
        prompt = sum(answer.prompt_tokens for answer in firsts)
        generated = sum(answer.generated_tokens for answer in answers)
        cached = PromptDetails(sum(answer.cached_tokens for answer in firsts))
        details = CompletionDetails(
            sum(answer.thought_tokens for answer in answers),
            sum(answer.accepted_drafts for answer in answers),
            sum(answer.rejected_drafts for answer in answers),
        )
        return cls(prompt, generated, prompt + generated, cached, details)


class TextUsage(msgspec.Struct, frozen=True):
    """`usage` of embeddings and scores: what was read."""

    prompt_tokens: int
    total_tokens: int


class Reply(Protocol):
    """How an endpoint writes answers: as events of a stream, or as one record at the end.

    Attributes:
        n: answers to each prompt.
        streams: whether as a stream.
        top_logprobs: how many of the most likely tokens to report at each position.
    """

    n: int
    streams: bool
    top_logprobs: int

    def head(self) -> bytes:
        """The first events of the stream."""

    def add(self, index: int, event: Token | TokenLogprob | tuple[TokenLogprob, ...] | FinishReason) -> bytes:
        """Take in an event of the answer with this index; what the stream sends for it."""

    def tail(self, answers: Sequence[PendingAnswer]) -> bytes:
        """The last events of the stream; all answers have ended."""

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that an error ends."""

    def whole(self, answers: Sequence[PendingAnswer]) -> object:
        """The record that answers a request without a stream."""


async def answer(service: Service, exchange: Exchange, requests: Sequence[Request], reply: Reply) -> None:
    """Answer a request: with the events of its answers as they come, or with a record at their end.

    A stream has its headers once its answers are in the queue, and comments while nothing else comes.

    Args:
        service: runs them.
        requests: one for each answer, with the `n` of a prompt side by side.
        reply: how they are written.

    Raises:
        ApiError: the queue is full; or an answer failed, without a stream.
        DisconnectedError: the client has gone.
    """
    exchange.record.prompt_tokens = sum(len(request.tokens) for request in requests[:: reply.n])
    queue, engine = AnswerQueue(), service.engine
    answers = [PendingAnswer(request, index, queue, reply.top_logprobs) for index, request in enumerate(requests)]

    with _submitted(service, exchange, answers, queue):
        reading = _AnswerWriter(exchange, queue, answers, reply)
        if reply.streams:
            await exchange.begin_events(reply.head())
            engine.wake()  # not before: its thread would take the interpreter from this one
            await reading.stream()
        else:
            engine.wake()
            await reading.all()
            await exchange.reply(reply.whole(answers))


@contextmanager
def _submitted(
    service: Service, exchange: Exchange, answers: Sequence[PendingAnswer], queue: AnswerQueue
) -> Iterator[None]:
    """Have answers in the engine's queue; those that have not ended by the end of the block are cancelled."""

    def end(error: ApiError) -> None:
        service.engine.cancel(answers, error)
        queue.wake()

    service.engine.submit(answers)
    try:
        with exchange.stopped_by(end):
            yield
    finally:
        if not all(pending.has_ended for pending in answers):  # one of them has failed
            end(DisconnectedError())
        queue.close()


async def run_all(service: Service, exchange: Exchange, requests: Sequence[Request]) -> list[NDArray[np.float32]]:
    """Run texts of a model that writes none, several in a pass, and as many passes as there are sessions at a time.

    Args:
        service: runs them.
        exchange: the request.
        requests: for each text.

    Returns:
        What each text gives, `[rows, width]`.

    Raises:
        ApiError: the queue is full, or one failed.
        DisconnectedError: the client has gone.
    """
    exchange.record.prompt_tokens = sum(len(request.tokens) for request in requests)
    packs = packed(requests, service.branch_rows, service.model.bundle.manifest)
    rows, cached_tokens = dict[int, NDArray[np.float32]](), 0
    for some in pieces(packs, service.limits.sessions):
        queue = AnswerQueue()
        answers = [PendingAnswer(pack.request, at, queue, gives_rows=True) for at, pack in enumerate(some)]
        with _submitted(service, exchange, answers, queue):
            service.engine.wake()
            await _ended(exchange, queue, len(answers))
        for pack, answer in zip(some, answers, strict=True):
            rows.update(pack.rows_of(np.concatenate(answer.rows)))
            cached_tokens += answer.cached_tokens
    exchange.record.cached_tokens = cached_tokens
    return [rows[number] for number in range(len(requests))]


async def _ended(exchange: Exchange, queue: AnswerQueue, left: int) -> None:
    """Wait for the end of so many answers.

    Raises:
        ApiError: one failed, or nobody waits for them any more.
    """
    while left:
        events = await queue.take()
        exchange.check()
        for _, event in events:
            if isinstance(event, ApiError):
                raise event
            left -= isinstance(event, str)


class _AnswerWriter:
    """Writes the events of answers as they come."""

    def __init__(self, exchange: Exchange, queue: AnswerQueue, answers: Sequence[PendingAnswer], reply: Reply) -> None:
        self._exchange = exchange
        self._queue = queue
        self._answers = answers
        self._reply = reply
        self._left = len(answers)
        self._data = b""  # of a stream, not sent yet

    async def all(self) -> None:
        """Read all events.

        Raises:
            ApiError: an answer failed, or nobody waits for it any more.
        """
        while self._left:
            events = await self._queue.take()
            self._exchange.check()
            self._add(events)
            self._data = b""

    async def stream(self) -> None:
        """Send all events.

        Raises:
            DisconnectedError: the client has gone.
        """
        exchange, reply = self._exchange, self._reply
        try:
            while True:
                events = await self._queue.take(self._wait_s, self._send_tokens)
                exchange.check()
                self._add(events)
                if not self._left:
                    break
                if self._data or not events:
                    await exchange.send_events(self._taken() or self._waiting())
        except DisconnectedError:
            raise
        except ApiError as error:
            exchange.record.error = error.code or error.body.error.type
            last = reply.failed(error.renamed(exchange.name_of))
        else:
            last = reply.tail(self._answers)
        await exchange.send_events(self._taken() + last, more=False)

    def _send_tokens(self, events: Sequence[tuple[int, ServerEvent]]) -> bool:
        """Nearly all events are tokens and find room in the connection's buffer."""
        if not self._exchange.connection.has_room:
            return False
        for _, event in events:
            if isinstance(event, (str, ApiError)):
                return False
        self._add(events)
        if self._data:
            self._exchange.send_part(self._taken())
        return True

    @property
    def _wait_s(self) -> float:
        return WAITING_S if any(answer.generated_tokens for answer in self._answers) else PREFILL_S

    def _waiting(self) -> bytes:
        """The comment that says how much of the prompt has run, or that keeps the connection open."""
        first = self._answers[0]
        if first.generated_tokens or first.sequence is None:
            return WAITING
        return f": prefill {first.sequence.prefilled_tokens} of {first.prompt_tokens}\n\n".encode()

    def _taken(self) -> bytes:
        data, self._data = self._data, b""
        return data

    def _add(self, events: Sequence[tuple[int, ServerEvent]]) -> None:
        """Take events in.

        Raises:
            ApiError: that of an answer.
        """
        record = self._exchange.record
        for index, event in events:
            if isinstance(event, Token):
                record.count_token()
            elif isinstance(event, ApiError):
                raise event
            elif isinstance(event, str):
                self._left -= 1
            self._data += self._reply.add(index, event)
        if not self._left:
            record.cached_tokens = sum(answer.cached_tokens for answer in self._answers[:: self._reply.n])
