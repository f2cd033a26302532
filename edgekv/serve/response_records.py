"""Answers of `/v1/responses` and the events of their streams."""

from __future__ import annotations

from typing import Any

import msgspec

from edgekv.serve.events import Finished
from edgekv.serve.usage import PromptDetails


class OutputText(msgspec.Struct, frozen=True):
    """A part of a message."""

    text: str
    type: str = "output_text"
    annotations: list[Any] = []
    logprobs: list[Any] = []


class MessageItem(msgspec.Struct, frozen=True):
    """The model's message."""

    id: str
    status: str
    content: list[OutputText]
    type: str = "message"
    role: str = "assistant"


class CallItem(msgspec.Struct, frozen=True):
    """A call of a tool; the arguments are a text of JSON."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str
    type: str = "function_call"


Item = MessageItem | CallItem


class OutputDetails(msgspec.Struct, frozen=True):
    """Part of the usage."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def of(cls, end: Finished) -> ResponseUsage:
        """Of an answer."""
        total = end.prompt_tokens + end.generated_tokens
        cached = PromptDetails(end.cached_tokens)
        return cls(end.prompt_tokens, cached, end.generated_tokens, OutputDetails(), total)


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why an answer was cut."""

    reason: str = "max_output_tokens"


class ResponseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request; in progress while it is streamed."""

    id: str
    created_at: int
    model: str
    status: str = "in_progress"
    output: list[Item] = []
    usage: ResponseUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    metadata: dict[str, Any] = {}
    text: dict[str, Any] = {}
    store: bool = True
    truncation: str = "disabled"
    error: None = None
    object: str = "response"


class Deleted(msgspec.Struct, frozen=True):
    """That a stored answer was removed."""

    id: str
    object: str = "response"
    deleted: bool = True


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event of a stream. Which fields it has depends on its type."""

    type: str
    sequence_number: int
    response: ResponseRecord | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: Item | None = None
    part: OutputText | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[Any] | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None
