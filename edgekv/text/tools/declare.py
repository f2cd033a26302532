"""How a conversation tells the model which tools there are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from edgekv.errors import refuse
from edgekv.spec.chat import DEFAULT, ChatTemplates, Message
from edgekv.text.tools.format import GENERIC, native_format
from edgekv.text.tools.tool import Tools


def render_with_tools(
    templates: ChatTemplates, messages: Sequence[Message], tools: Tools | None, /, **variables: Any
) -> str:
    """The text of a conversation, with the tools that the model may call.

    A template that shows how its model calls tools declares them itself. For another one the messages do: the tools
    and the form of an answer are described in the system prompt, or in front of the first message of the user. Earlier
    calls, their results and answers are written in that form. The arguments of earlier calls become objects: no text
    is an empty one, and what the model wrote instead of one is told under the name `arguments`.

    Args:
        templates: of the model.
        tools: that the model may call; None for none.
        variables: further variables of the template.

    Raises:
        UsageError: arguments of an earlier call are nested too deep, or the template refuses the messages.
    """
    try:
        told, declared = declared_messages(templates, messages, tools)
    except RecursionError:
        refuse("messages", "values nested too deep", "arguments that Python can write as JSON", "Nest them less.")
    return templates.render(told, tools=declared, **variables)


def declared_messages(
    templates: ChatTemplates, messages: Sequence[Message], tools: Tools | None
) -> tuple[Sequence[Message], list[Mapping[str, Any]] | None]:
    """The messages, with objects as arguments of calls, and the tools, for a template."""
    messages = [_with_objects(message) for message in messages]
    if tools is None and not any(message.get("role") == "tool" or message.get("tool_calls") for message in messages):
        return messages, None
    if native_format(templates) is None:
        if tools is not None and tools.callable:
            return _described(_written(messages, has_form=True), tools), None
        if "tool" not in templates.templates.get(DEFAULT, ""):
            return _written(messages, has_form=False), None
    return messages, None if tools is None else tools.declarations


def _with_objects(message: Message) -> Message:
    """A message whose calls have objects as arguments: OpenAI's API has them as text, and templates read objects."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return {**message, "tool_calls": [_with_object(call) for call in calls]} if isinstance(calls, list) else message


def _with_object(call: object) -> object:
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}
    return {**call, "arguments": _arguments(call["arguments"])} if "arguments" in call else call


def _arguments(written: object) -> Mapping[str, Any]:
    arguments: object = written
    if isinstance(written, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(written) if written.strip() else None
    if isinstance(arguments, Mapping):
        return arguments
    return {} if arguments is None else {"arguments": written}


def _described(messages: Sequence[Message], tools: Tools) -> list[Message]:
    """The messages with a description of the tools."""
    functions = "\n".join(_json(tool.declaration.get("function")) for tool in tools.callable)
    form = 'Respond in JSON format with "tool_call", a request to call a function.'
    if tools.choice == "auto":
        form = (
            'Respond in JSON format, either with "tool_call", a request to call a function, '
            'or with "response", a reply to the user\'s request.'
        )
    description = f"You can call these functions:\n{functions}\n\n{form}"
    described = list(messages)
    if described and described[0].get("role") in ("system", "developer"):
        described[0] = {**described[0], "content": _joined(described[0].get("content"), description)}
        return described
    at = next((at for at, message in enumerate(described) if message.get("role") == "user"), None)
    if at is None:
        return [{"role": "user", "content": description}, *described]
    described[at] = {**described[at], "content": _joined(description, described[at].get("content"))}
    return described


def _written(messages: Sequence[Message], *, has_form: bool) -> list[Message]:
    """The messages with earlier calls and their results as text, for templates that do not know them.

    Args:
        has_form: whether answers without calls are written as the model has to write them now.
    """
    written: list[Message] = []
    names: dict[str, object] = {}
    after_result = False
    for message in messages:
        role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
        if role == "assistant" and isinstance(calls, list) and calls:
            functions = [_function(call, names) for call in calls]
            text = "\n".join(f"{GENERIC.open}{_json(function)}{GENERIC.close}" for function in functions)
            written.append({"role": role, "content": _joined(content, text) if content else text})
        elif role == "assistant" and has_form and isinstance(content, str):
            written.append({**message, "content": f"{GENERIC.reply}{_json(content)}}}"})
        elif role == "tool":
            name = message.get("name") or names.get(repr(message.get("tool_call_id")))
            result = {"name": name, "content": content} if name else {"content": content}
            text = _json({"tool_result": result})
            _add_user(written, text, after_result=after_result)
        elif role == "user" and after_result:
            _add_user(written, content, after_result=True)
        else:
            written.append(message)
        after_result = role == "tool" or (role == "user" and after_result)
    return written


def _add_user(messages: list[Message], content: object, *, after_result: bool) -> None:
    """Add to the user's turn that has results of tools, as many templates want the roles in turn."""
    if after_result:
        messages[-1] = {"role": "user", "content": _joined(messages[-1].get("content"), content)}
    else:
        messages.append({"role": "user", "content": content})


def _function(call: object, names: dict[str, object]) -> object:
    """The function of a call; its name is noted under the call's id, of any type."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    name = function.get("name")
    names[repr(call.get("id"))] = name
    return {"name": name, "arguments": function.get("arguments")}


def _joined(first: object, second: object) -> object:
    """Two contents as one: texts, or lists of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: object) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
