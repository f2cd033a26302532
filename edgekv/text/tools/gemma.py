"""Gemma's notation of arguments: `{city:<escape>Paris<escape>,days:3}`. Keys are bare, strings are between markers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from edgekv.errors import UsageError, shown
from edgekv.text.constraint import SEPARATORS
from edgekv.text.tools.tool import Tool

_SCALARS = ("integer", "number", "boolean", "null")
_LABELS = ("title", "description", "default", "examples", "type", "$schema", "additionalProperties")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}


class IncompleteError(ValueError):
    """The text ends before the arguments do."""


def arguments_rules(tool: Tool, field: str, prefix: str, quote: str) -> tuple[str, list[str]]:
    """Lark rules for the arguments of a tool, and the name of the first one. Their size is linear in the schema's.

    Args:
        field: of its schema, for errors.
        prefix: of the rules' names.
        quote: marker of strings, in Lark.

    Raises:
        UsageError: the schema is malformed, or uses what cannot be written in this notation.
    """
    writer = _Rules(prefix, quote)
    return writer.rule(tool.parameters, field), writer.rules


class _Rules:
    """Collects rules, a few for each schema; those of equal schemas are one."""

    def __init__(self, prefix: str, quote: str) -> None:
        self.rules: list[str] = []
        self._names: dict[str, str] = {}  # by the texts of rules
        self._prefix = prefix
        self._quote = quote

    def rule(self, schema: Any, field: str) -> str:
        """The name of a rule for values of a schema."""
        return self._add(self._text(schema, field))

    def _add(self, text: str) -> str:
        if text not in self._names:
            self._names[text] = f"{self._prefix}{len(self.rules)}"
            self.rules.append(f"{self._names[text]}: {text}")
        return self._names[text]

    def _text(self, schema: Any, field: str) -> str:
        if not isinstance(schema, Mapping):
            raise _refused(field, schema, "a schema as an object")
        if "const" in schema:
            return self._value(schema["const"], f"{field}.const")
        if "enum" in schema:
            values = _list(schema, "enum", field)
            return " | ".join(self._value(value, f"{field}.enum[{at}]") for at, value in enumerate(values))
        for name in ("anyOf", "oneOf"):
            if name in schema:
                parts = _list(schema, name, field)
                return " | ".join(self.rule(part, f"{field}.{name}[{at}]") for at, part in enumerate(parts))
        kinds = schema.get("type", "string")
        if isinstance(kinds, list):
            unique_kinds = dict.fromkeys(kind if isinstance(kind, str) else "" for kind in _list(schema, "type", field))
            return " | ".join(self.rule({**schema, "type": kind}, field) for kind in unique_kinds)
        if kinds in _SCALARS:
            return f"%json {json.dumps({**schema, 'x-guidance': SEPARATORS})}"
        if kinds == "string":
            return self._string(schema, field)
        if kinds == "array":
            return self._array(schema, field)
        if kinds == "object":
            return self._object(schema, field)
        raise _refused(f"{field}.type", kinds, f"string, array, object, {', '.join(_SCALARS)}, or a list of them")

    def _string(self, schema: Mapping[str, Any], field: str) -> str:
        _check(schema, ("minLength", "maxLength"), field)
        min_length, max_length = _limits(schema, "minLength", "maxLength", field)
        return rf"{self._quote} /(.|\n){{{min_length},{'' if max_length is None else max_length}}}/ {self._quote}"

    def _array(self, schema: Mapping[str, Any], field: str) -> str:
        _check(schema, ("items", "minItems", "maxItems"), field)
        min_items, max_items = _limits(schema, "minItems", "maxItems", field)
        item = self.rule(schema.get("items", {}), f"{field}.items")
        if max_items == 0:
            return '"[" "]"'
        more = f'"[" {item} ("," {item}){{{max(min_items - 1, 0)},{"" if max_items is None else max_items - 1}}} "]"'
        return more if min_items else f'"[" "]" | {more}'

    def _object(self, schema: Mapping[str, Any], field: str) -> str:
        """Properties in their order: a rule for what follows one that was written, and one if none was."""
        _check(schema, ("properties", "required"), field)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping):
            raise _refused(f"{field}.properties", properties, "schemas by name")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _refused(f"{field}.required", required, "a list of names")
        if missing := [name for name in required if name not in properties]:
            raise _refused(f"{field}.required", repr(missing[0]), "names of properties")
        needed = frozenset(required)
        first = later = '"}"'
        for name, property in reversed([*properties.items()]):
            if ":" in name:
                raise _refused(f"{field}.properties", repr(name), "names without a colon, which ends them")
            item = f"{json.dumps(name + ':')} {self.rule(property, f'{field}.properties.{name}')}"
            is_needed = name in needed
            first = self._add(f"{item} {later}" if is_needed else f"{item} {later} | {first}")
            later = self._add(f'"," {item} {later}' if is_needed else f'("," {item})? {later}')
        return f'"{{" {first}'

    def _value(self, value: Any, field: str) -> str:
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value)} {self._quote}"
        if isinstance(value, (dict, list)):
            raise _refused(field, value, "text, a number, true, false or null")
        return json.dumps(json.dumps(value))


def _list(schema: Mapping[str, Any], name: str, field: str) -> list[Any]:
    values = schema[name]
    if not isinstance(values, list) or not values:
        raise _refused(f"{field}.{name}", values, "a list of one or more")
    return values


def _limits(schema: Mapping[str, Any], min_name: str, max_name: str, field: str) -> tuple[int, int | None]:
    """The least and the greatest number; None for no greatest one."""
    for name in (min_name, max_name):
        value = schema.get(name, 0)
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise _refused(f"{field}.{name}", value, "a whole number of at least 0")
    low, high = schema.get(min_name, 0), schema.get(max_name)
    if high is not None and high < low:
        raise _refused(f"{field}.{max_name}", high, f"at least {low}, {min_name}")
    return low, high


def _check(schema: Mapping[str, Any], known: tuple[str, ...], field: str) -> None:
    if unknown := [name for name in schema if name not in known and name not in _LABELS]:
        raise _refused(field, f"the keyword {unknown[0]}", "what can be written in Gemma's notation")


def _refused(field: str, got: object, expected: str) -> UsageError:
    fix = "Use plain types, enum, minLength, maxLength, minItems and maxItems."
    return UsageError(field, got=f"{shown(got)}"[:80], expected=expected, fix=fix)


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
    number = _NUMBER.match(text, at)
    if number is None or number.end() == len(text):
        raise IncompleteError
    return json.loads(number[0]), number.end()


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
