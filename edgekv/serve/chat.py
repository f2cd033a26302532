"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import UNSET, UnsetType

from edgekv.serve.chat_records import (
    AnswerMessage,
    CallRecord,
    ChatCompletion,
    Choice,
    ChoiceLogprobs,
    Chunk,
    ChunkChoice,
    ContentLogprob,
    Delta,
    FunctionRecord,
    TopLogprob,
)
from edgekv.serve.errors import ApiError, refused
from edgekv.serve.events import Event, Finished, FinishReason, Piece
from edgekv.serve.exchange import Exchange
from edgekv.serve.form import ResponseFormat, read_form
from edgekv.serve.job import Work
from edgekv.serve.sampling import SamplingFields, check_top_logprobs, check_wanted_tokens
from edgekv.serve.service import Service
from edgekv.serve.sse import DONE, event, stream
from edgekv.serve.usage import Usage

_encode = msgspec.json.Encoder().encode


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """The body of a request."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        """Refuse what is not supported.

        Raises:
            ApiError: naming the field.
        """
        for name in ("audio", "functions", "function_call", "web_search_options"):
            if getattr(self, name) is not None:
                raise refused(name, got="a value", expected="nothing", fix="It is not supported; leave it out.")
        if self.modalities not in (None, ["text"]):
            raise refused("modalities", got=self.modalities, expected="text", fix="Leave it out.")
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", got="no logprobs", expected="logprobs true with it", fix="Set logprobs.")

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens to generate; None if the request does not say.

        Raises:
            ApiError: out of range.
        """
        if self.max_completion_tokens is not None:
            return check_wanted_tokens("max_completion_tokens", self.max_completion_tokens)
        return check_wanted_tokens("max_tokens", self.max_tokens)


async def chat_completions(service: Service, exchange: Exchange) -> None:
    """Answer a conversation.

    Raises:
        ApiError: the request is refused.
        EdgeKVError: likewise.
        DisconnectedError: the client has gone.
    """
    request = await exchange.read(ChatRequest)
    lora = service.check_name(request.model)
    request.check()
    work = await _work(service, exchange, request, lora)
    reply = _Reply(service, request)
    async with service.job(exchange, work) as channel:
        if request.stream:
            await stream(exchange, channel, reply.head(), reply.stream)
            return
        while not reply.add(await channel.take()):
            pass
        await exchange.reply(reply.whole())


async def _work(service: Service, exchange: Exchange, request: ChatRequest, lora: str | None) -> Work:
    form = await service.apart(
        exchange,
        lambda: read_form(request.response_format, request.tools, request.tool_choice, request.parallel_tool_calls),
    )
    prompt = await service.rendered(request.messages, form, request.chat_template_kwargs)
    return await service.turn(exchange, prompt, request, form, request.wanted_tokens, _top(request), lora)


def _top(request: ChatRequest) -> int | None:
    return check_top_logprobs("top_logprobs", request.top_logprobs or 0) if request.logprobs else None


class _Reply:
    """Turns events into what is sent."""

    def __init__(self, service: Service, request: ChatRequest) -> None:
        self._service = service
        self._request = request
        self._id = f"chatcmpl-{uuid4().hex}"
        self._created = int(time.time())
        self._texts: list[str] = []
        self._calls: list[CallRecord] = []
        self._logprobs: list[ContentLogprob] = []
        self._end: Finished | None = None

    def add(self, events: Sequence[Event]) -> bool:
        """Take events in; True at the end.

        Raises:
            ApiError: the job failed.
        """
        for each in events:
            if isinstance(each, ApiError):
                raise each
            if isinstance(each, Finished):
                self._end = each
                return True
            if isinstance(each, Piece):
                self._texts.append(each.text)
                self._logprobs += self._content(each)
                self._take_calls(each)
        return False

    def whole(self) -> ChatCompletion:
        """The answer to a request that wants no stream."""
        assert self._end is not None
        logprobs = ChoiceLogprobs(self._logprobs) if self._request.logprobs else None
        text = "".join(self._texts)
        message = AnswerMessage(text or (None if self._calls else ""), tool_calls=self._calls or UNSET)
        choice = Choice(message, self._reason(self._end), logprobs)
        name = self._request.model
        return ChatCompletion(
            id=self._id, created=self._created, model=name, choices=[choice], usage=Usage.of(self._end)
        )

    def head(self) -> bytes:
        """The first event of a stream."""
        return self._chunk(ChunkChoice(Delta("assistant", "")))

    def stream(self, events: Sequence[Event]) -> tuple[bytes, bool]:
        """The next events of a stream, and whether they are the last."""
        data = b""
        for each in events:
            if isinstance(each, ApiError):
                return data + event(_encode(each.body)), True
            if isinstance(each, Finished):
                data += self._chunk(ChunkChoice(Delta(), self._reason(each)))
                if self._request.includes_usage:
                    data += event(_encode(self._made([], Usage.of(each))))
                return data + DONE, True
            if isinstance(each, Piece) and (each.text or each.logprob):
                logprobs = ChoiceLogprobs(self._content(each)) if each.logprob else None
                data += self._chunk(ChunkChoice(Delta(content=each.text), logprobs=logprobs))
            if isinstance(each, Piece) and each.calls:
                data += self._chunk(ChunkChoice(Delta(tool_calls=self._take_calls(each))))
        return data, False

    def _chunk(self, choice: ChunkChoice) -> bytes:
        return event(_encode(self._made([choice], None if self._request.includes_usage else UNSET)))

    def _made(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> Chunk:
        return Chunk(id=self._id, created=self._created, model=self._request.model, choices=choices, usage=usage)

    def _take_calls(self, piece: Piece) -> list[CallRecord]:
        """The calls that a token completes, as they are sent."""
        first = len(self._calls)
        for at, call in enumerate(piece.calls, first):
            index = at if self._request.stream else UNSET
            self._calls.append(CallRecord(f"call_{uuid4().hex[:24]}", FunctionRecord(call.name, call.arguments), index))
        return self._calls[first:]

    def _reason(self, end: Finished) -> FinishReason:
        return "tool_calls" if self._calls and end.reason == "stop" else end.reason

    def _content(self, piece: Piece) -> list[ContentLogprob]:
        if piece.logprob is None:
            return []
        names, found = self._service.names, piece.logprob
        own = TopLogprob.of(found.token, names)
        return [ContentLogprob(own.token, own.logprob, own.bytes, [TopLogprob.of(each, names) for each in found.top])]
