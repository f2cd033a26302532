"""The functions that a model may call, as OpenAI's API declares them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgekv.errors import UsageError
from edgekv.text.grammar import Grammar

ToolChoice = Literal["auto", "none", "required"]
CHOICES: tuple[ToolChoice, ...] = ("auto", "none", "required")
MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made.

    Attributes:
        name: of the function.
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: letters, digits, `_`, `.` and `-`.
        parameters: JSON schema of its arguments, which are an object.
        declaration: as it was given, for the chat template.
    """

    name: str
    parameters: Mapping[str, Any]
    declaration: Mapping[str, Any]

    @classmethod
    def read(cls, declaration: Mapping[str, Any], field: str) -> Tool:
        """A tool as OpenAI's API declares it: `{"type": "function", "function": {"name": ..., "parameters": ...}}`.

        Raises:
            UsageError: it is malformed, or the schema is wrong or too large.
        """
        function = declaration.get("function") if isinstance(declaration, Mapping) else None
        if not isinstance(function, Mapping) or declaration.get("type", "function") != "function":
            fix = 'Use {"type": "function", "function": {"name": ...}}.'
            raise UsageError(field, got="another kind of tool", expected="a function", fix=fix)
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            expected = "up to 64 letters, digits, _, . or -"
            raise UsageError(f"{field}.function.name", got=repr(name)[:80], expected=expected, fix="Rename it.")
        declared = function.get("parameters")
        parameters = _NO_PARAMETERS if declared is None else declared
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            got = type(parameters).__name__ if not isinstance(parameters, Mapping) else parameters.get("type")
            fix = 'Use {"type": "object", "properties": ...}.'
            raise UsageError(f"{field}.function.parameters", got=got, expected="a schema of an object", fix=fix)
        schema = {"type": "object", **parameters}
        try:
            Grammar.json_schema(schema)
        except UsageError as error:
            raise UsageError(
                f"{field}.function.parameters", got=error.got, expected=error.expected, fix=error.fix
            ) from None
        return cls(name, schema, declaration)


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a call, and how the model may use them. `Tools.read` makes one.

    Attributes:
        tools: at least one.
        choice: `auto`, the model decides; `none`, it calls nothing; `required`, it calls one; else a tool's name.
        parallel: whether it may make several calls.
    """

    tools: tuple[Tool, ...]
    choice: str = "auto"
    parallel: bool = True

    @classmethod
    def read(cls, declarations: Sequence[Mapping[str, Any]], choice: str = "auto", *, parallel: bool = True) -> Tools:
        """Tools as OpenAI's API declares them.

        Raises:
            UsageError: a tool is malformed, two have one name, or the choice names none of them.
        """
        if not 0 < len(declarations) <= MAX_TOOLS:
            raise UsageError("tools", got=len(declarations), expected=f"1 to {MAX_TOOLS}", fix="Give fewer.")
        tools = tuple(Tool.read(declaration, f"tools[{number}]") for number, declaration in enumerate(declarations))
        names = [tool.name for tool in tools]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError("tools", got=f"{twice} twice", expected="a name for each", fix="Rename one of them.")
        if choice not in (*CHOICES, *names):
            expected = ", ".join([*CHOICES, *names])[:300]
            raise UsageError("tool_choice", got=repr(choice)[:80], expected=expected, fix="Choose one of them.")
        return cls(tools, choice, parallel)

    @property
    def declarations(self) -> list[Mapping[str, Any]]:
        """As they were given, for the chat template."""
        return [tool.declaration for tool in self.tools]

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.choice in CHOICES:
            return () if self.choice == "none" else self.tools
        return tuple(tool for tool in self.tools if tool.name == self.choice)
