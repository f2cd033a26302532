"""Messages of a request in the form that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from edgekv.serve.errors import refused
from edgekv.serve.pictures import URL_PART, MessagePictures
from edgekv.spec.chat import IMAGE_PART, Message

_TEXT_PARTS = ("text", "input_text", "output_text")


def template_messages(
    messages: Sequence[Mapping[str, Any]], pictures: MessagePictures, *, has_developer: bool
) -> list[Message]:
    """Messages with content as text, or parts if there are pictures, and arguments of tool calls as objects.

    Args:
        messages: as the API has them.
        pictures: opens those of the messages.
        has_developer: whether the template knows the role developer; otherwise it becomes system.

    Raises:
        ApiError: content that is neither text nor a picture.
        UsageError: a picture that cannot be read, or one for a bundle that reads text alone.
    """
    return [_message(message, f"messages[{at}]", pictures, has_developer) for at, message in enumerate(messages)]


def _content(content: object, field: str, pictures: MessagePictures) -> object:
    """A content with its pictures by number; without any, as `text_of` gives it."""
    if not isinstance(content, list) or not any(isinstance(p, dict) and p.get("type") == URL_PART for p in content):
        return text_of(content, field)
    found = list[dict[str, Any]]()
    for at, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == URL_PART:
            found.append({"type": IMAGE_PART, "picture": pictures.number(part, f"{field}[{at}]")})
        else:
            found.append({"type": "text", "text": text_of([part], f"{field}[{at}]")})
    return found


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
            fix = "Give text; a model that reads pictures takes them as image_url in /v1/chat/completions."
            raise refused(f"{field}[{at}]", got=repr(kind)[:40], expected="a text part", fix=fix)
        texts.append(text)
    return "".join(texts)


def _message(message: Mapping[str, Any], field: str, pictures: MessagePictures, has_developer: bool) -> Message:
    found = {name: value for name, value in message.items() if value is not None}
    found["content"] = _content(message.get("content"), f"{field}.content", pictures)
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
