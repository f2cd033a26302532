"""`/v1/responses`: conversations that the server keeps."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from uuid import uuid4

import msgspec

from edgekv.runtime.load_options import OnFull
from edgekv.serve.answers import PromptDetails, Reply
from edgekv.serve.chat import URL_PART, ChatRequest, answer_chat, check_count, text_of
from edgekv.serve.engine_thread import FinishReason, PendingAnswer
from edgekv.serve.errors import ApiError, refused
from edgekv.serve.fields import UnsupportedField
from edgekv.serve.generation import ResponseFormat, SamplingFields, accept
from edgekv.serve.http import Exchange, event
from edgekv.serve.logprobs import TokenLogprob
from edgekv.serve.service import Service
from edgekv.text import Token

_INCLUDED = ("reasoning.encrypted_content", "message.input_image.image_url", "file_search_call.results")
"""What a request may ask to be included: thoughts are in plain text, and there is nothing of the others."""
_TRUNCATIONS: dict[str, OnFull] = {"auto": "drop-oldest", "disabled": "stop"}
_PLACE: dict[str, Any] = {"content_index": 0}
"""An item of text has one part; `_event` of a reply adds the number of the item."""
MAX_BYTES = 64 << 20
"""Of all keys together, shared evenly."""
_MIN_BYTES = 4 << 20
"""Of a key, however many there are: a conversation of the longest request."""


class OutputText(msgspec.Struct, frozen=True):
    """A part of a message."""

    text: str
    type: str = "output_text"
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, frozen=True):
    """Thoughts of the model."""

    text: str
    type: str = "reasoning_text"


class ReasoningItem(msgspec.Struct, frozen=True):
    """What the model thought before its message or calls."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: list[Any] = []
    type: str = "reasoning"


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


Item = ReasoningItem | MessageItem | CallItem


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
    def of(cls, answer: PendingAnswer) -> ResponseUsage:
        """Of an answer that has ended."""
        prompt, generated = answer.prompt_tokens, answer.generated_tokens
        cached, details = PromptDetails(answer.cached_tokens), OutputDetails(answer.thought_tokens)
        return cls(prompt, cached, generated, details, prompt + generated)


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


class DeletionRecord(msgspec.Struct, frozen=True):
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
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[Any] | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer and the conversation that it ends.

    Attributes:
        record: as it was sent.
        messages: of the conversation, with the answer and without instructions.
        size_bytes: about what they take.
    """

    record: ResponseRecord
    messages: tuple[dict[str, Any], ...]
    size_bytes: int


class ResponseStore:
    """The newest answers of each API key, in memory. No key takes the room of another."""

    def __init__(self, max_responses: int, keys: int = 1) -> None:
        """Start with none.

        Args:
            max_responses: answers of a key.
            keys: API keys that there are; without authentication all clients are one.
        """
        self._max_responses = max_responses
        self._max_bytes = max(_MIN_BYTES, MAX_BYTES // max(keys, 1))
        self._held: dict[str | None, OrderedDict[str, StoredResponse]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def add(self, salt: str | None, record: ResponseRecord, messages: tuple[dict[str, Any], ...]) -> None:
        """Keep an answer; the oldest ones of the key go if there are too many."""
        size = len(msgspec.json.encode((record, messages)))
        if size > self._max_bytes:
            return
        held = self._held.setdefault(salt, OrderedDict())
        held[record.id] = StoredResponse(record, messages, size)
        while (
            len(held) > self._max_responses or sum(response.size_bytes for response in held.values()) > self._max_bytes
        ):
            held.popitem(last=False)

    def get(self, salt: str | None, name: str, param: str | None = None) -> StoredResponse:
        """An answer of this key.

        Raises:
            ApiError: 404, there is none of this name.
        """
        held = self._held.get(salt)
        response = None if held is None else held.get(name)
        if response is None:
            message = f"response: got {name[:80]!r}; expected one that is stored. Send the whole conversation."
            raise ApiError(404, message, param=param, code="response_not_found")
        return response

    def remove(self, salt: str | None, name: str) -> None:
        """Forget an answer.

        Raises:
            ApiError: 404, there is none of this name.
        """
        self.get(salt, name)
        del self._held[salt][name]


def read_input(request_input: str | Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages as chat completions have them, and the field of the request that each comes from.

    Raises:
        ApiError: an item that is not supported, or has not what it needs.
    """
    if isinstance(request_input, str):
        return [{"role": "user", "content": request_input}], ["input"]
    check_count("input", len(request_input))
    turns = _Turns()
    fields: list[str] = []
    for at, item in enumerate(request_input):
        field, kind = f"input[{at}]", item.get("type", "message")
        if kind == "message":
            turns.add({"role": item.get("role"), "content": _content_of(item.get("content"), f"{field}.content")})
        elif kind == "function_call":
            turns.call(item.get("call_id"), _text(item, field, "name"), _text(item, field, "arguments"))
        elif kind == "function_call_output":
            given_output = item.get("output")
            output = _content_of(given_output, f"{field}.output") if isinstance(given_output, list) else None
            output = _text(item, field, "output") if output is None else output
            turns.add({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind == "reasoning":
            turns.think(_thoughts_of(item.get("content")))
        else:
            got, expected = repr(kind)[:40], "message, reasoning, function_call or function_call_output"
            raise refused(f"{field}.type", got=got, expected=expected, fix="Leave it out.")
        fields += [field] * (len(turns.messages) - len(fields))
    turns.end()
    return turns.messages, [*fields, *["input"] * (len(turns.messages) - len(fields))]


def _content_of(content: object, field: str) -> object:
    """A message's content as chat completions have it: text, or parts if there are pictures."""
    if not isinstance(content, list) or not any(_is_picture(part) for part in content):
        return text_of(content, field)
    return [
        {"type": URL_PART, URL_PART: part.get(URL_PART), "detail": part.get("detail")}
        if _is_picture(part)
        else {"type": "text", "text": text_of([part], f"{field}[{at}]")}
        for at, part in enumerate(content)
    ]


def _is_picture(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _text(item: Mapping[str, Any], field: str, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise refused(f"{field}.{name}", got=type(value).__name__, expected="text", fix="Give a string.")
    return value


def as_messages(output: Sequence[Item]) -> list[dict[str, Any]]:
    """An answer as messages of the next turn."""
    turns = _Turns()
    for item in output:
        if isinstance(item, CallItem):
            turns.call(item.call_id, item.name, item.arguments)
            continue
        text = "".join(part.text for part in item.content)
        if isinstance(item, ReasoningItem):
            turns.think(text)
        else:
            turns.add({"role": "assistant", "content": text})
    turns.end()
    return turns.messages


class _Turns:
    """Messages made of items: thoughts, calls and a text that follow each other are one message of the assistant.

    Attributes:
        messages: so far; whole at the `end`.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._thoughts = ""  # of the next text or call

    def add(self, message: dict[str, Any]) -> None:
        """Add a message; a text of the assistant's joins calls before it."""
        if message["role"] != "assistant":
            self.end()
            self.messages.append(message)
        elif (last := self._last) is not None and last["content"] is None:
            self._change(content=message["content"])
        else:
            self.messages.append(message)
            self._change()

    def call(self, call_id: Any, name: Any, arguments: Any) -> None:
        """Add a call; it joins the assistant's message before it."""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        if self._last is None:
            self.messages.append({"role": "assistant", "content": None})
        self._change(tool_calls=[*self.messages[-1].get("tool_calls", []), call])

    def think(self, thoughts: str) -> None:
        """Add thoughts."""
        self._thoughts = _joined(self._thoughts, thoughts)

    def end(self) -> None:
        """Thoughts that nothing follows are a message too, or of the one before them."""
        if self._thoughts:
            if self._last is None:
                self.messages.append({"role": "assistant", "content": ""})
            self._change()

    @property
    def _last(self) -> dict[str, Any] | None:
        """The last message, if it is the assistant's."""
        return self.messages[-1] if self.messages and self.messages[-1]["role"] == "assistant" else None

    def _change(self, **fields: Any) -> None:
        """Change fields of the last message, and give it the thoughts."""
        changed = {**self.messages[-1], **fields}
        if self._thoughts:
            changed["reasoning_content"] = _joined(changed.get("reasoning_content", ""), self._thoughts)
        self.messages[-1], self._thoughts = changed, ""


def _joined(first: str, second: str) -> str:
    return f"{first}\n\n{second}" if first and second else first or second


def _thoughts_of(content: object) -> str:
    """The text of a `reasoning` item; empty if it is encrypted, or a summary alone."""
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


class TextFormat(msgspec.Struct, frozen=True):
    """`text.format`."""

    type: str = "text"
    name: str | None = None
    schema: dict[str, Any] | bool | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    """`reasoning`; the whole of the model's thoughts is sent, with any summary asked for."""

    effort: str | None = None


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    """The body of a request."""

    path: ClassVar[str] = "/v1/responses"
    names: ClassVar[dict[str, str]] = {
        **SamplingFields.names,
        "prompt": "input",
        "messages": "input",
        "max_new_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "response_format.json_schema": "text.format.schema",
        "response_format": "text.format",
    }
    unsupported: ClassVar[dict[str, UnsupportedField]] = {
        "max_tokens": UnsupportedField("Use max_output_tokens."),
        "max_completion_tokens": UnsupportedField("Use max_output_tokens."),
        "response_format": UnsupportedField("Use text.format."),
        "add_special_tokens": UnsupportedField("The chat template writes them; leave it out.", (False,)),
        "top_logprobs": UnsupportedField("Use /v1/chat/completions for log-probabilities.", (0,)),
    }

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    truncation: str | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None

    def check(self) -> None:
        super().check()
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            got, fix = repr(self.text.verbosity)[:40], "It is not supported; leave it out."
            raise refused("text.verbosity", got=got, expected="medium", fix=fix)
        for name in self.include or ():
            if name not in _INCLUDED:
                fix = "Leave it out."
                raise refused("include", got=repr(name)[:60], expected=" or ".join(_INCLUDED), fix=fix)
        for name in ("background", "conversation", "prompt"):
            if getattr(self, name):
                raise refused(name, got="a value", expected="nothing", fix="It is not supported; leave it out.")
        if self.n not in (None, 1):
            raise refused("n", got=self.n, expected="1", fix="Send one request for each answer.")

    def on_full(self, default: OnFull) -> OnFull:
        """What `truncation` asks for if the conversation is longer than the context.

        Raises:
            ApiError: another value.
        """
        if self.truncation is None:
            return default
        if self.truncation not in _TRUNCATIONS:
            got, expected = repr(self.truncation)[:40], " or ".join(_TRUNCATIONS)
            raise refused("truncation", got=got, expected=expected, fix="Leave it out for the server's default.")
        return _TRUNCATIONS[self.truncation]

    def as_chat(self, messages: list[dict[str, Any]]) -> ChatRequest:
        """The same request as a chat completion.

        Args:
            messages: of the whole conversation.

        Raises:
            ApiError: a tool that is no function.
        """
        shared = {name: getattr(self, name) for name in SamplingFields.__struct_fields__}
        asked = None if self.text is None else self.text.format
        return ChatRequest(
            **shared,
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            response_format=None if asked is None else ResponseFormat(asked.type, schema=asked.schema),
            tools=None if self.tools is None else [_tool(tool, f"tools[{at}]") for at, tool in enumerate(self.tools)],
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
        )


class Responses:
    """Answers conversations, and keeps the answers that later requests continue."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service = service
        self._store = store

    async def create(self, exchange: Exchange) -> None:
        """`POST /v1/responses`.

        Raises:
            ApiError, EdgeKVError: the request is refused.
            DisconnectedError: the client has gone.
        """
        service = self._service
        body = await exchange.body()

        def read() -> tuple[ChatRequest, Reply, str | None, OnFull]:
            request, lora = accept(service, exchange, body, ResponsesRequest)
            before: tuple[dict[str, Any], ...] = ()
            if request.previous_response_id is not None:
                param = "previous_response_id"
                before = self._store.get(exchange.salt, request.previous_response_id, param).messages
            new, fields = read_input(request.input)
            messages = [*before, *new]
            check_count("input", len(messages))
            system = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
            places = [*["instructions"] * len(system), *["previous_response_id"] * len(before), *fields]
            on_full = request.on_full(service.on_full)
            chat = request.as_chat([*system, *messages])
            exchange.name_of = lambda field: request.name_of(_place_of(chat.name_of(field) or field, places))

            def store(record: ResponseRecord) -> None:
                if request.store is not False:
                    self._store.add(exchange.salt, record, (*messages, *as_messages(record.output)))

            return chat, _Reply(service, request, on_full, store), lora, on_full

        await answer_chat(service, exchange, read)

    async def get(self, exchange: Exchange) -> None:
        """`GET /v1/responses/ID`.

        Raises:
            ApiError: it is not stored.
        """
        await exchange.reply(self._store.get(exchange.salt, exchange.name).record)

    async def delete(self, exchange: Exchange) -> None:
        """`DELETE /v1/responses/ID`.

        Raises:
            ApiError: it is not stored.
        """
        self._store.remove(exchange.salt, exchange.name)
        await exchange.reply(DeletionRecord(exchange.name))


def _place_of(field: str, places: Sequence[str]) -> str:
    """The place in the request of a field of a message or of a tool, which chat completions nest deeper.

    Args:
        field: such as `messages[1].content` or `tools[0].function.name`.
        places: of each message.
    """
    if match := re.fullmatch(r"messages\[(\d+)\](.*)", field):
        place = places[int(match[1])]
        return place + match[2] if place.startswith("input[") else place
    return re.sub(r"^(tools\[\d+\])\.function\b", r"\1", field)


def _tool(declared: dict[str, Any], field: str) -> dict[str, Any]:
    """A function as chat completions declare it."""
    if declared.get("type") != "function":
        got, fix = repr(declared.get("type"))[:40], "Leave it out."
        raise refused(f"{field}.type", got=got, expected="function", fix=fix)
    kept = {name: declared[name] for name in ("name", "description", "parameters") if declared.get(name) is not None}
    return {"type": "function", "function": kept}


class _Reply:
    """See `edgekv.serve.answers.Reply`.

    Attributes:
        record: the answer so far; whole at the end.
    """

    n = 1
    top_logprobs = 0

    def __init__(
        self, service: Service, request: ResponsesRequest, on_full: OnFull, store: Callable[[ResponseRecord], None]
    ) -> None:
        self._store = store
        self.streams = bool(request.stream)
        asked = request.text.format if request.text and request.text.format else TextFormat()
        shown = {name: value for name, value in msgspec.to_builtins(asked).items() if value is not None}
        self.record = ResponseRecord(
            id=f"resp_{uuid4().hex}",
            created_at=int(time.time()),
            model=request.model or service.name,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            previous_response_id=request.previous_response_id,
            temperature=request.temperature,
            top_p=request.top_p,
            tools=request.tools or [],
            tool_choice=request.tool_choice or "auto",
            parallel_tool_calls=request.parallel_tool_calls is not False,
            metadata=request.metadata or {},
            text={"format": shown},
            store=request.store is not False,
            truncation="auto" if on_full == "drop-oldest" else "disabled",
        )
        self._number = 2  # of the next event; two begin the stream
        self._items: list[Item] = []
        self._written: Literal["message", "reasoning"] | None = None  # the item that is open
        self._name = self._text = ""  # its id, and its text so far

    def head(self) -> bytes:
        return b"".join(
            event(StreamEvent(type=kind, sequence_number=at, response=self.record), kind)
            for at, kind in enumerate(("response.created", "response.in_progress"))
        )

    def add(self, index: int, happened: Token | TokenLogprob | tuple[TokenLogprob, ...] | FinishReason) -> bytes:
        data = b""
        if not isinstance(happened, Token):
            return data
        if happened.thoughts:
            data += self._opened("reasoning")
            self._text += happened.thoughts
            data += self._event("reasoning_text.delta", item_id=self._name, delta=happened.thoughts, **_PLACE)
        if happened.text:
            data += self._opened("message")
            self._text += happened.text
            data += self._event("output_text.delta", item_id=self._name, delta=happened.text, **_PLACE, logprobs=[])
        for call in happened.tool_calls:
            data += self._closed("completed")
            at, name = len(self._items), f"fc_{uuid4().hex[:24]}"
            item = CallItem(name, f"call_{uuid4().hex[:24]}", call.name, call.arguments, "completed")
            started = msgspec.structs.replace(item, arguments="", status="in_progress")
            data += self._event("output_item.added", output_index=at, item=started)
            data += self._event(
                "function_call_arguments.delta", item_id=name, output_index=at, delta=call.arguments
            ) + self._event(
                "function_call_arguments.done", item_id=name, output_index=at, name=call.name, arguments=call.arguments
            )
            data += self._event("output_item.done", output_index=at, item=item)
            self._items.append(item)
        return data

    def tail(self, answers: Sequence[PendingAnswer]) -> bytes:
        (answer,) = answers
        status = "incomplete" if answer.reason == "length" else "completed"
        data = b"" if self._items or self._written else self._opened("message")
        data += self._closed(status)
        self.record = msgspec.structs.replace(
            self.record,
            status=status,
            output=self._items,
            usage=ResponseUsage.of(answer),
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
        )
        self._store(self.record)
        return data + self._event(status, response=self.record)

    def whole(self, answers: Sequence[PendingAnswer]) -> ResponseRecord:
        self.tail(answers)
        return self.record

    def failed(self, error: ApiError) -> bytes:
        made = StreamEvent(
            type="error", sequence_number=self._number, code=error.code, message=str(error), param=error.param
        )
        return event(made, "error")

    def _opened(self, kind: Literal["message", "reasoning"]) -> bytes:
        """The events that begin an item of text after the one before; none if it is open."""
        if self._written == kind:
            return b""
        data, is_message = self._closed("completed"), kind == "message"
        self._written, self._name = kind, f"{'msg' if is_message else 'rs'}_{uuid4().hex[:24]}"
        made = MessageItem if is_message else ReasoningItem
        data += self._event(
            "output_item.added", output_index=len(self._items), item=made(self._name, "in_progress", [])
        )
        part = OutputText("") if is_message else ReasoningText("")
        return data + self._event("content_part.added", item_id=self._name, **_PLACE, part=part)

    def _closed(self, status: str) -> bytes:
        """The events that end the item of text, if one is open."""
        if self._written is None:
            return b""
        item: Item
        name, text = self._name, self._text
        if self._written == "message":
            part: OutputText | ReasoningText = OutputText(text)
            item = MessageItem(name, status, [OutputText(text)])
            data = self._event("output_text.done", item_id=name, **_PLACE, text=text, logprobs=[])
        else:
            part = ReasoningText(text)
            item = ReasoningItem(name, status, [part])
            data = self._event("reasoning_text.done", item_id=name, **_PLACE, text=text)
        data += self._event("content_part.done", item_id=name, **_PLACE, part=part)
        data += self._event("output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._written, self._name, self._text = None, "", ""
        return data

    def _event(self, kind: str, **fields: Any) -> bytes:
        if "content_index" in fields:
            fields["output_index"] = len(self._items)
        name = f"response.{kind}"
        made = StreamEvent(type=name, sequence_number=self._number, **fields)
        self._number += 1
        return event(made, name)
