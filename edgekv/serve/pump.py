"""From the events of the engine to the answer of a request: the same for chats, completions and responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgekv.serve.channel import Channel
from edgekv.serve.engine_thread import Wanted
from edgekv.serve.errors import ApiError
from edgekv.serve.events import Event, Finished, Piece, PromptLogprobs
from edgekv.serve.exchange import WAITING, Exchange
from edgekv.serve.request_log import RequestRecord
from edgekv.serve.service import Service

WAITING_S = 15.0
"""Proxies close a connection that is silent for a minute."""


class Reply(Protocol):
    """How an endpoint writes answers: as events of a stream, or as one record at the end."""

    def head(self) -> bytes:
        """The first events of the stream."""

    def add(self, index: int, event: Piece | PromptLogprobs | Finished) -> bytes:
        """Take in an event of the answer with this index; what the stream sends for it."""

    def tail(self, ends: Sequence[Finished]) -> bytes:
        """The last events of the stream; `ends` are those of all answers."""

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that an error ends."""

    def whole(self, ends: Sequence[Finished]) -> object:
        """The record that answers a request without a stream."""


async def answer(
    service: Service, exchange: Exchange, wanted: Sequence[Wanted], reply: Reply, *, n: int = 1, streams: bool
) -> None:
    """Answer a request: with the events of its answers as they come, or with a record at their end.

    A stream has its headers once its answers are in the queue, and comments while nothing else comes.

    Args:
        service: runs them.
        exchange: the request.
        wanted: of each prompt.
        reply: how they are written.
        n: answers to each prompt; those of a prompt have indices side by side.
        streams: whether as a stream.

    Raises:
        ApiError: the queue is full; or an answer failed, without a stream.
        DisconnectedError: the client has gone.
    """
    exchange.record.prompt_tokens = sum(len(each.request.tokens) for each in wanted)
    each_answer = [each.for_answer(number) for each in wanted for number in range(n)]
    async with service.answering(exchange, each_answer) as channel:
        answers = _Answers(reply, len(each_answer), n, exchange.record)
        if streams:
            await _stream(exchange, channel, answers)
            return
        while not answers.are_complete:
            _, error = answers.add(await channel.take())
            if error is not None:
                raise error
        await exchange.reply(reply.whole(answers.ends))


async def _stream(exchange: Exchange, channel: Channel, answers: _Answers) -> None:
    await exchange.begin_events()
    if head := answers.reply.head():
        await exchange.send_events(head)
    while True:
        events = await channel.take(WAITING_S)
        data, error = answers.add(events)
        if error is not None:
            await exchange.send_events(data + answers.reply.failed(error.renamed(exchange.name_of)), more=False)
            return
        if answers.are_complete:
            await exchange.send_events(data + answers.reply.tail(answers.ends), more=False)
            return
        if data or not events:
            await exchange.send_events(data or WAITING)


class _Answers:
    """The answers to a request so far.

    Attributes:
        reply: how they are written.
    """

    def __init__(self, reply: Reply, count: int, n: int, record: RequestRecord) -> None:
        self.reply = reply
        self._ends: list[Finished | None] = [None] * count
        self._n = n
        self._record = record

    @property
    def are_complete(self) -> bool:
        """Whether all have ended."""
        return None not in self._ends

    @property
    def ends(self) -> list[Finished]:
        """Their ends, in the order of their indices."""
        return [end for end in self._ends if end is not None]

    def add(self, events: Sequence[tuple[int, Event]]) -> tuple[bytes, ApiError | None]:
        """Take events in; what a stream sends for them, and the error that ends the request."""
        data = b""
        for index, event in events:
            if isinstance(event, ApiError):
                self._record.error = event.code or event.body.error.type
                return data, event
            if isinstance(event, Piece):
                self._record.count_token()
            elif isinstance(event, Finished):
                self._ends[index] = event
            data += self.reply.add(index, event)
        if self.are_complete:
            self._record.cached_tokens = sum(end.cached_tokens for end in self.ends[:: self._n])
        return data, None
