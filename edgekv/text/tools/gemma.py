"""Gemma's notation of arguments: `{city:<escape>Paris<escape>,days:3}`. Keys are bare, strings are between markers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from edgekv.errors import UsageError
from edgekv.text.constraint import SEPARATORS
from edgekv.text.tools.tool import Tool

_SCALARS = ("integer", "number", "boolean", "null")
_LABELS = ("title", "description", "default", "examples", "type", "$schema", "additionalProperties")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}


class IncompleteError(ValueError):
    """The text ends before the arguments do."""


def arguments_rules(tool: Tool, prefix: str, quote: str) -> tuple[str, list[str]]:
    """Lark rules for the arguments of a tool, and the name of the first one.

    Args:
        tool: the tool.
        prefix: of the rules' names.
        quote: marker of strings, in Lark.

    Raises:
        UsageError: the schema uses what cannot be written in this notation.
    """
    writer = _Rules(tool.name, prefix, quote)
    return writer.rule(tool.parameters), writer.rules


class _Rules:
    """Collects rules, one for each schema."""

    def __init__(self, tool: str, prefix: str, quote: str) -> None:
        self.rules: list[str] = []
        self._tool = tool
        self._prefix = prefix
        self._quote = quote

    def rule(self, schema: Any) -> str:
        """The name of a rule for values of a schema."""
        name = f"{self._prefix}{len(self.rules)}"
        place = len(self.rules)
        self.rules.append("")
        self.rules[place] = f"{name}: {self._text(schema)}"
        return name

    def _text(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            raise self._refused(f"the schema {schema!r}"[:80])
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return " | ".join(self._value(each) for each in values)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return " | ".join(self.rule(each) for each in schema[name])
        kinds = schema.get("type", "string")
        if isinstance(kinds, list):
            return " | ".join(self.rule({**schema, "type": each}) for each in kinds)
        if kinds in _SCALARS:
            return f"%json {json.dumps({**schema, 'x-guidance': SEPARATORS})}"
        if kinds == "string":
            return self._string(schema)
        return self._array(schema) if kinds == "array" else self._object(schema)

    def _string(self, schema: Mapping[str, Any]) -> str:
        self._check(schema, ("minLength", "maxLength"))
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        return rf"{self._quote} /(.|\n){{{least},{most}}}/ {self._quote}"

    def _array(self, schema: Mapping[str, Any]) -> str:
        self._check(schema, ("items", "minItems", "maxItems"))
        item, least, most = self.rule(schema.get("items", {})), schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f'"[" {item} ("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}} "]"'
        return more if least else f'"[" "]" | {more}'

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Properties in their order; `later` follows one that was written, `first` does not."""
        self._check(schema, ("properties", "required"))
        required = schema.get("required", [])
        first, later = [""], ""
        for name, each in reversed(schema.get("properties", {}).items()):
            item = f"{json.dumps(name + ':')} {self.rule(each)}"
            first = [f"{item} {later}".strip()] if name in required else [f"{item} {later}".strip(), *first]
            written = f'"," {item}'
            later = f"{written} {later}" if name in required else f"({written})? {later}"
        return " | ".join(f'"{{" {each} "}}"' for each in first)

    def _value(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value)} {self._quote}"
        if isinstance(value, (dict, list)):
            raise self._refused("an enum of objects or lists")
        return json.dumps(json.dumps(value))

    def _check(self, schema: Mapping[str, Any], known: tuple[str, ...]) -> None:
        if unknown := [name for name in schema if name not in known and name not in _LABELS]:
            raise self._refused(f"the keyword {unknown[0]}")

    def _refused(self, found: str) -> UsageError:
        return UsageError(
            f"tools: {self._tool}",
            got=found,
            expected="what can be written in Gemma's notation",
            fix="Use plain types, enum, minLength, maxLength, minItems and maxItems.",
        )


def read_arguments(text: str, at: int, quote: str) -> tuple[Any, int]:
    """The value that begins at a place of the text, and where it ends.

    Raises:
        IncompleteError: the text ends before it.
        ValueError: it is no value.
    """
    if text.startswith(quote, at):
        start = at + len(quote)
        end = text.find(quote, start)
        if end < 0:
            raise IncompleteError
        return text[start:end], end + len(quote)
    if text[at : at + 1] in ("{", "["):
        return _read_items(text, at, quote)
    for word, value in _WORDS.items():
        if text.startswith(word, at):
            return value, at + len(word)
    found = _NUMBER.match(text, at)
    if found is None or found.end() == len(text):
        raise IncompleteError
    return json.loads(found[0]), found.end()


def _read_items(text: str, at: int, quote: str) -> tuple[Any, int]:
    is_object, closing = text[at] == "{", {"{": "}", "[": "]"}[text[at]]
    items: list[Any] = []
    names: list[str] = []
    at += 1
    while text[at : at + 1] != closing:
        if text[at : at + 1] == "," and items:
            at += 1
        if is_object:
            end = text.find(":", at)
            if end < 0:
                raise IncompleteError
            names.append(text[at:end])
            at = end + 1
        if at >= len(text):
            raise IncompleteError
        value, at = read_arguments(text, at, quote)
        items.append(value)
        if at >= len(text):
            raise IncompleteError
    return (dict(zip(names, items, strict=True)) if is_object else items), at + 1
