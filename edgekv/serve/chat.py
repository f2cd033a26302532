"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4

import msgspec
from msgspec import UNSET, UnsetType

from edgekv.serve.engine_thread import Wanted
from edgekv.serve.errors import ApiError, refused
from edgekv.serve.events import Finished, FinishReason, Piece, PromptLogprobs
from edgekv.serve.exchange import DONE, Exchange, event
from edgekv.serve.form import ResponseFormat, read_form
from edgekv.serve.logprobs import Likelihood, TokenNames
from edgekv.serve.pump import answer
from edgekv.serve.sampling import SamplingFields, check_top_logprobs, check_wanted_tokens
from edgekv.serve.service import Service
from edgekv.serve.usage import Usage


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """The body of a request."""

    names: ClassVar[dict[str, str]] = {
        **SamplingFields.names,
        "prompt": "messages",
        "max_new_tokens": "max_completion_tokens",
        "json_schema": "response_format.json_schema.schema",
    }

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


class TopLogprob(msgspec.Struct, frozen=True):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]

    @classmethod
    def of(cls, found: Likelihood, names: TokenNames) -> TopLogprob:
        return cls(names.text(found.id), found.logprob, list(names.data(found.id)))


class ContentLogprob(TopLogprob, frozen=True):
    """A token of the answer, with the most likely ones."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a choice."""

    content: list[ContentLogprob]
    refusal: None = None


class FunctionRecord(msgspec.Struct, frozen=True):
    """A function and the arguments of a call, as a text of JSON."""

    name: str
    arguments: str


class CallRecord(msgspec.Struct, frozen=True):
    """A call of a tool; `index` is its number, in streams only."""

    id: str
    function: FunctionRecord
    index: int | UnsetType = UNSET
    type: str = "function"


class AnswerMessage(msgspec.Struct, frozen=True):
    """The model's message."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[CallRecord] | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True):
    """An answer."""

    message: AnswerMessage
    finish_reason: FinishReason
    logprobs: ChoiceLogprobs | None = None
    index: int = 0


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer to a request."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: str = "chat.completion"


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallRecord] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """A part of an answer."""

    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChoiceLogprobs | None = None
    index: int = 0


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"


async def chat_completions(service: Service, exchange: Exchange) -> None:
    """Answer a conversation.

    Raises:
        ApiError, EdgeKVError: the request is refused.
        DisconnectedError: the client has gone.
    """
    request, lora = await service.accept(exchange, ChatRequest)
    n = request.choices(1, service.limits)
    wanted = await _wanted(service, exchange, request, lora)
    await answer(service, exchange, [wanted], _Reply(service, request, n), n=n, streams=bool(request.stream))


async def _wanted(service: Service, exchange: Exchange, request: ChatRequest, lora: str | None) -> Wanted:
    form = await service.apart(
        exchange,
        lambda: read_form(request.response_format, request.tools, request.tool_choice, request.parallel_tool_calls),
    )
    wanted = request.wanted_tokens
    prompt = await service.rendered(
        exchange, request.messages, form, request.chat_template_kwargs, wanted_tokens=wanted
    )
    top = check_top_logprobs("top_logprobs", request.top_logprobs or 0) if request.logprobs else None
    return await service.turn(exchange, prompt, request, form, wanted, top, lora)


@dataclass(slots=True)
class _Answer:
    """One of the answers so far."""

    text: str = ""
    calls: list[CallRecord] = field(default_factory=list)
    logprobs: list[ContentLogprob] = field(default_factory=list)

    def reason(self, end: Finished) -> FinishReason:
        """Why it ended."""
        return "tool_calls" if self.calls and end.reason == "stop" else end.reason


class _Reply:
    """See `edgekv.serve.pump.Reply`."""

    def __init__(self, service: Service, request: ChatRequest, n: int) -> None:
        self._names = service.names
        self._model = request.model or service.name
        self._request = request
        self._id = f"chatcmpl-{uuid4().hex}"
        self._created = int(time.time())
        self._answers = [_Answer() for _ in range(n)]

    def head(self) -> bytes:
        return b"".join(
            self._chunk(ChunkChoice(Delta("assistant", ""), index=index)) for index in range(len(self._answers))
        )

    def add(self, index: int, happened: Piece | PromptLogprobs | Finished) -> bytes:
        so_far, streams = self._answers[index], bool(self._request.stream)
        if isinstance(happened, Finished):
            return self._chunk(ChunkChoice(Delta(), so_far.reason(happened), index=index)) if streams else b""
        if isinstance(happened, PromptLogprobs):
            return b""
        logprobs, calls = self._logprobs(happened), self._calls(happened, len(so_far.calls))
        so_far.calls += calls
        if not streams:
            so_far.text += happened.text
            so_far.logprobs += logprobs
            return b""
        data = b""
        if happened.text or logprobs:
            found = ChoiceLogprobs(logprobs) if logprobs else None
            data += self._chunk(ChunkChoice(Delta(content=happened.text), logprobs=found, index=index))
        if calls:
            data += self._chunk(ChunkChoice(Delta(tool_calls=calls), index=index))
        return data

    def tail(self, ends: Sequence[Finished]) -> bytes:
        usage = event(self._made([], self._usage(ends))) if self._request.includes_usage else b""
        return usage + DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.body)

    def whole(self, ends: Sequence[Finished]) -> ChatCompletion:
        choices = [
            Choice(
                AnswerMessage(answer.text or (None if answer.calls else ""), tool_calls=answer.calls or UNSET),
                answer.reason(end),
                ChoiceLogprobs(answer.logprobs) if self._request.logprobs else None,
                index,
            )
            for index, (answer, end) in enumerate(zip(self._answers, ends, strict=True))
        ]
        usage = self._usage(ends)
        return ChatCompletion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _usage(self, ends: Sequence[Finished]) -> Usage:
        return Usage.of(ends, len(self._answers))

    def _chunk(self, choice: ChunkChoice) -> bytes:
        return event(self._made([choice], None if self._request.includes_usage else UNSET))

    def _made(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> Chunk:
        return Chunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _calls(self, piece: Piece, first: int) -> list[CallRecord]:
        """The calls that a token completes; their numbers begin with `first`."""
        return [
            CallRecord(
                f"call_{uuid4().hex[:24]}",
                FunctionRecord(call.name, call.arguments),
                number if self._request.stream else UNSET,
            )
            for number, call in enumerate(piece.calls, first)
        ]

    def _logprobs(self, piece: Piece) -> list[ContentLogprob]:
        if piece.logprob is None:
            return []
        found = piece.logprob
        own = TopLogprob.of(found.token, self._names)
        top = [TopLogprob.of(each, self._names) for each in found.top]
        return [ContentLogprob(own.token, own.logprob, own.bytes, top)]
