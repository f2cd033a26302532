"""`/v1/responses`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from uuid import uuid4

import msgspec

from edgekv.load_options import OnFull
from edgekv.serve.errors import ApiError, refused
from edgekv.serve.events import Finished, Piece, PromptLogprobs
from edgekv.serve.exchange import Exchange, event
from edgekv.serve.form import AnswerForm, ResponseFormat, SchemaFormat, read_form
from edgekv.serve.pump import answer
from edgekv.serve.response_input import as_messages, read_input
from edgekv.serve.response_records import (
    CallItem,
    Deleted,
    IncompleteDetails,
    Item,
    MessageItem,
    OutputText,
    ResponseRecord,
    ResponseUsage,
    StreamEvent,
)
from edgekv.serve.sampling import SamplingFields, check_wanted_tokens
from edgekv.serve.service import Service

_TRUNCATIONS: dict[str, OnFull] = {"auto": "drop-oldest", "disabled": "stop"}


class TextFormat(msgspec.Struct, frozen=True):
    """`text.format`."""

    type: str = "text"
    name: str | None = None
    schema: dict[str, Any] | bool | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """`text`."""

    format: TextFormat | None = None


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    """The body of a request."""

    names: ClassVar[dict[str, str]] = {
        **SamplingFields.names,
        "prompt": "input",
        "messages": "input",
        "max_new_tokens": "max_output_tokens",
        "json_schema": "text.format.schema",
        "response_format.json_schema": "text.format.schema",
        "response_format": "text.format",
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

    def check(self) -> None:
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
            found, wanted = repr(self.truncation)[:40], " or ".join(_TRUNCATIONS)
            raise refused("truncation", got=found, expected=wanted, fix="Leave it out for the server's default.")
        return _TRUNCATIONS[self.truncation]

    def form(self) -> AnswerForm:
        """What the answer has to be.

        Raises:
            ApiError: an unknown format, or a tool that is no function.
            UsageError: a schema or a tool that is wrong.
        """
        asked = None if self.text is None else self.text.format
        wanted = None if asked is None else ResponseFormat(asked.type, SchemaFormat(asked.name, asked.schema))
        tools = None if self.tools is None else [_tool(each, f"tools[{at}]") for at, each in enumerate(self.tools)]
        return read_form(wanted, tools, self.tool_choice, self.parallel_tool_calls)


async def create_response(service: Service, exchange: Exchange) -> None:
    """`POST /v1/responses`.

    Raises:
        ApiError, EdgeKVError: the request is refused.
        DisconnectedError: the client has gone.
    """
    request, lora = await service.accept(exchange, ResponsesRequest)
    before: tuple[dict[str, Any], ...] = ()
    if request.previous_response_id is not None:
        param = "previous_response_id"
        before = service.responses.get(exchange.salt, request.previous_response_id, param).messages
    new, fields = read_input(request.input)
    messages = [*before, *new]
    system = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    places = [*["instructions"] * len(system), *["previous_response_id"] * len(before), *fields]
    exchange.name_of = lambda field: request.name_of(_place_of(field, places))
    form = await service.apart(exchange, request.form)
    wanted = check_wanted_tokens("max_output_tokens", request.max_output_tokens)
    on_full = request.on_full(service.on_full)
    prompt = await service.rendered(exchange, [*system, *messages], form, wanted_tokens=wanted, on_full=on_full)
    asked = await service.turn(exchange, prompt, request, form, wanted, lora=lora)

    def store(record: ResponseRecord) -> None:
        if request.store is not False:
            service.responses.add(exchange.salt, record, (*messages, *as_messages(record.output)))

    await answer(service, exchange, [asked], _Reply(service, request, on_full, store), streams=bool(request.stream))


async def get_response(service: Service, exchange: Exchange) -> None:
    """`GET /v1/responses/ID`.

    Raises:
        ApiError: it is not stored.
    """
    await exchange.reply(service.responses.get(exchange.salt, exchange.scope["path_params"]["name"]).record)


async def delete_response(service: Service, exchange: Exchange) -> None:
    """`DELETE /v1/responses/ID`.

    Raises:
        ApiError: it is not stored.
    """
    name = exchange.scope["path_params"]["name"]
    service.responses.remove(exchange.salt, name)
    await exchange.reply(Deleted(name))


def _place_of(field: str, places: Sequence[str]) -> str:
    """The place in the request of a field of a message or of a tool, which chat completions nest deeper.

    Args:
        field: such as `messages[1].content` or `tools[0].function.name`.
        places: of each message.
    """
    if found := re.fullmatch(r"messages\[(\d+)\](.*)", field):
        place = places[int(found[1])]
        return place + found[2] if place.startswith("input[") else place
    return re.sub(r"^(tools\[\d+\])\.function\b", r"\1", field)


def _tool(declared: dict[str, Any], field: str) -> dict[str, Any]:
    """A function as chat completions declare it."""
    if declared.get("type") != "function":
        found, fix = repr(declared.get("type"))[:40], "Leave it out."
        raise refused(f"{field}.type", got=found, expected="function", fix=fix)
    kept = {name: declared[name] for name in ("name", "description", "parameters") if declared.get(name) is not None}
    return {"type": "function", "function": kept}


class _Reply:
    """See `edgekv.serve.pump.Reply`.

    Attributes:
        record: the answer so far; whole at the end.
    """

    def __init__(
        self, service: Service, request: ResponsesRequest, on_full: OnFull, store: Callable[[ResponseRecord], None]
    ) -> None:
        self._store = store
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
        self._message = ""  # id of the message that is written
        self._text = ""

    def head(self) -> bytes:
        return b"".join(
            event(StreamEvent(type=kind, sequence_number=at, response=self.record), kind)
            for at, kind in enumerate(("response.created", "response.in_progress"))
        )

    def add(self, index: int, happened: Piece | PromptLogprobs | Finished) -> bytes:
        data = b""
        if not isinstance(happened, Piece):
            return data
        if happened.text:
            data += self._opened() if not self._message else b""
            self._text += happened.text
            data += self._event("output_text.delta", item_id=self._message, delta=happened.text, **_PLACE, logprobs=[])
        for call in happened.calls:
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

    def tail(self, ends: Sequence[Finished]) -> bytes:
        (end,) = ends
        status = "incomplete" if end.reason == "length" else "completed"
        data = b"" if self._items or self._message else self._opened()
        data += self._closed(status)
        self.record = msgspec.structs.replace(
            self.record,
            status=status,
            output=self._items,
            usage=ResponseUsage.of(end),
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
        )
        self._store(self.record)
        return data + self._event(status, response=self.record)

    def whole(self, ends: Sequence[Finished]) -> ResponseRecord:
        self.tail(ends)
        return self.record

    def failed(self, error: ApiError) -> bytes:
        made = StreamEvent(
            type="error", sequence_number=self._number, code=error.code, message=str(error), param=error.param
        )
        return event(made, "error")

    def _opened(self) -> bytes:
        """The events that begin a message."""
        self._message = f"msg_{uuid4().hex[:24]}"
        item = MessageItem(self._message, "in_progress", [])
        return self._event("output_item.added", output_index=len(self._items), item=item) + self._event(
            "content_part.added", item_id=self._message, **_PLACE, part=OutputText("")
        )

    def _closed(self, status: str) -> bytes:
        """The events that end the message, if one is written."""
        if not self._message:
            return b""
        part = OutputText(self._text)
        item = MessageItem(self._message, status, [part])
        data = self._event("output_text.done", item_id=self._message, **_PLACE, text=self._text, logprobs=[])
        data += self._event("content_part.done", item_id=self._message, **_PLACE, part=part)
        data += self._event("output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._message = self._text = ""
        return data

    def _event(self, kind: str, **fields: Any) -> bytes:
        if "content_index" in fields:
            fields["output_index"] = len(self._items)
        name = f"response.{kind}"
        made = StreamEvent(type=name, sequence_number=self._number, **fields)
        self._number += 1
        return event(made, name)


_PLACE: dict[str, Any] = {"content_index": 0}
"""A message has one part; `_event` adds the number of the message."""
