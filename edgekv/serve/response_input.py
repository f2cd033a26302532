"""The input of `/v1/responses` as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgekv.serve.errors import refused
from edgekv.serve.messages import text_of
from edgekv.serve.response_records import CallItem, Item


def read_input(given: str | Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages as chat completions have them, and the field of the request that each comes from.

    Raises:
        ApiError: an item that is not supported, or has not what it needs.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}], ["input"]
    messages: list[dict[str, Any]] = []
    fields: list[str] = []
    for at, item in enumerate(given):
        field, kind = f"input[{at}]", item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": text_of(item.get("content"), f"{field}.content")})
        elif kind == "function_call":
            name, arguments = _text(item, field, "name"), _text(item, field, "arguments")
            _add_call(messages, item.get("call_id"), name, arguments)
        elif kind == "function_call_output":
            given_output = item.get("output")
            output = text_of(given_output, f"{field}.output") if isinstance(given_output, list) else None
            output = _text(item, field, "output") if output is None else output
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind != "reasoning":
            found, wanted = repr(kind)[:40], "message, function_call or function_call_output"
            raise refused(f"{field}.type", got=found, expected=wanted, fix="Leave it out.")
        fields += [field] * (len(messages) - len(fields))
    return messages, fields


def _text(item: Mapping[str, Any], field: str, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise refused(f"{field}.{name}", got=type(value).__name__, expected="text", fix="Give a string.")
    return value


def as_messages(output: Sequence[Item]) -> list[dict[str, Any]]:
    """An answer as messages of the next turn."""
    messages: list[dict[str, Any]] = []
    for item in output:
        if isinstance(item, CallItem):
            _add_call(messages, item.call_id, item.name, item.arguments)
        else:
            messages.append({"role": "assistant", "content": "".join(part.text for part in item.content)})
    return messages


def _add_call(messages: list[dict[str, Any]], call_id: Any, name: Any, arguments: Any) -> None:
    """Add a call to the assistant's message before it, or to a new one."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    if messages and messages[-1]["role"] == "assistant":
        last = messages[-1]
        messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", []), call]}
    else:
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
