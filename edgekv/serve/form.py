"""What an answer has to be: `response_format`, and the tools that it may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from edgekv.serve.errors import refused
from edgekv.text import Tools
from edgekv.text.grammar import Grammar

_KINDS = ("text", "json_object", "json_schema")


class SchemaFormat(msgspec.Struct, frozen=True):
    """A named JSON schema."""

    name: str | None = None
    schema: dict[str, Any] | bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """`response_format`."""

    type: str
    json_schema: SchemaFormat | None = None


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of an answer.

    Attributes:
        grammar: what the text has to be; None for free text.
        tools: functions that it may call; None if there are none.
    """

    grammar: Grammar | None = None
    tools: Tools | None = None


def read_form(
    wanted: ResponseFormat | None, tools: Sequence[Mapping[str, Any]] | None, choice: object, parallel: bool | None
) -> AnswerForm:
    """The form that a request asks for.

    Args:
        wanted: `response_format`.
        tools: as chat completions declare them.
        choice: `tool_choice`.
        parallel: `parallel_tool_calls`.

    Raises:
        ApiError: an unknown format or choice, a format without its schema, or a schema together with tools.
        UsageError: a schema or a tool that is wrong or too large.
    """
    grammar = read_grammar(wanted)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise refused("tool_choice", got="a choice without tools", expected="tools with it", fix="Add tools.")
        return AnswerForm(grammar)
    found = Tools.read(tools, _choice(choice), parallel=parallel is not False)
    if grammar is not None and found.callable:
        fix = "Leave the tools out, or set tool_choice to none."
        raise refused("response_format", got="a schema together with tools", expected="one of them", fix=fix)
    return AnswerForm(grammar, found)


def read_grammar(wanted: ResponseFormat | None) -> Grammar | None:
    """What the text has to be; None for free text.

    Raises:
        ApiError: an unknown format, or one without its schema.
        UsageError: a schema that is wrong or too large.
    """
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar.json_object()
    if wanted.type != "json_schema":
        found, fix = repr(wanted.type)[:40], "Leave it out for text."
        raise refused("response_format.type", got=found, expected=" or ".join(_KINDS), fix=fix)
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise refused("response_format.json_schema", got="no schema", expected="one", fix="Add schema.")
    return Grammar.json_schema(wanted.json_schema.schema)


def _choice(choice: object) -> str:
    """A `tool_choice` as `Tools.read` takes it: a word, or the name of a function."""
    if choice is None:
        return "auto"
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function", choice)
        choice = function.get("name") if isinstance(function, dict) else None
    if not isinstance(choice, str):
        fix = 'Use {"type": "function", "function": {"name": ...}}.'
        raise refused("tool_choice", got="another object", expected="auto, none, required or a function", fix=fix)
    return choice
