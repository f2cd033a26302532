"""Messages of a request in the form that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from edgekv.serve.errors import refused
from edgekv.spec.chat import Message

_TEXT_PARTS = ("text", "input_text", "output_text")


def template_messages(messages: Sequence[Mapping[str, Any]], *, has_developer: bool) -> list[Message]:
    """Messages with content as text and arguments of tool calls as objects.

    Args:
        messages: as the API has them.
        has_developer: whether the template knows the role developer; otherwise it becomes system.

    Raises:
        ApiError: content that is no text.
    """
    return [_message(message, f"messages[{at}]", has_developer) for at, message in enumerate(messages)]


def text_of(content: object, field: str) -> object:
    """The text of a content: itself, or its parts joined. Whatever else it is, the template's check refuses.

    Args:
        content: of a message.
        field: its name in errors.

    Raises:
        ApiError: a part that is no text, such as an image.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) and kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            fix = "This model reads text only."
            raise refused(f"{field}[{at}]", got=repr(kind)[:40], expected="a text part", fix=fix)
        texts.append(text)
    return "".join(texts)


def _message(message: Mapping[str, Any], field: str, has_developer: bool) -> Message:
    found = {name: value for name, value in message.items() if value is not None}
    found["content"] = text_of(message.get("content"), f"{field}.content")
    if found.get("role") == "developer" and not has_developer:
        found["role"] = "system"
    calls = found.get("tool_calls")
    if isinstance(calls, list):
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _call(call: object) -> object:
    """A tool call whose arguments are an object: the API has them as a text of JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (msgspec.DecodeError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
