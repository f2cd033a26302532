"""The input of `/v1/responses` as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgekv.serve.errors import refused
from edgekv.serve.messages import text_of
from edgekv.serve.response_records import CallItem, Item


def read_input(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat completions have them.

    Raises:
        ApiError: an item that is not supported.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(given):
        field, kind = f"input[{at}]", item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": text_of(item.get("content"), field)})
        elif kind == "function_call":
            _add_call(messages, item.get("call_id"), item.get("name"), item.get("arguments"))
        elif kind == "function_call_output":
            output = text_of(item.get("output"), field)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind != "reasoning":
            found, wanted = repr(kind)[:40], "message, function_call or function_call_output"
            raise refused(f"{field}.type", got=found, expected=wanted, fix="Leave it out.")
    return messages


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
