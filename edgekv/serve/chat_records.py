"""Answers of `/v1/chat/completions`."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from edgekv.serve.events import FinishReason
from edgekv.serve.logprobs import Likelihood, TokenNames
from edgekv.serve.usage import Usage


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
