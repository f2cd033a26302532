"""What a text has to be: a JSON value of a schema, a match of a regular expression, or a text of a Lark grammar."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from edgekv.errors import EngineError, refuse
from edgekv.text.schema import has_finite_answer

GrammarKind = Literal["json_schema", "regex", "lark", "tools"]

MAX_GRAMMAR_BYTES = 1 << 16
"""A JSON object of 2,000 properties has about this size and compiles in 0.7 s."""
MAX_TOOLS_BYTES = 1 << 18
"""Of all tools: they compile in 3 s."""
MAX_GRAMMAR_DEPTH = 64
MAX_DIVISOR = 100_000
"""A divisor becomes an automaton with a state for each remainder; one of 100,000 compiles in 0.4 s."""
_ANY_OBJECT = '{"type": "object"}'
_DIVISOR = re.compile(r'"multipleOf"\s*:\s*([-+.\deE]{1,40})')
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_MAX_DECADES = 12


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the whole generated text. Valid from construction, as far as it can be judged without a model.

    `json_schema`, `json_object`, `regex` and `lark` make one. What the schema or grammar means is checked when it is
    compiled for a tokenizer, before prefill.

    Attributes:
        kind: how `text` is read; `tools` is Lark that `tools_grammar` writes.
        text: a JSON schema, a regular expression, or a Lark grammar in llguidance's syntax.

    Raises:
        UsageError: more than 65,536 bytes (262,144 of tools), not JSON, nested deeper than 64, a schema without a
            finite instance, or divisors (`multipleOf`) that need too large an automaton.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip():
            refuse(self.field, type(self.text).__name__ if self.text != "" else "an empty text", "text", "Give one.")
        if "\0" in self.text or any("\ud800" <= character <= "\udfff" for character in self.text):
            refuse(self.field, "a zero byte or half a surrogate pair", "Unicode text", "Correct the encoding.")
        max_bytes = MAX_TOOLS_BYTES if self.kind == "tools" else MAX_GRAMMAR_BYTES
        if (size := len(self.text.encode())) > max_bytes:
            refuse(self.field, f"{size:,} bytes", f"at most {max_bytes:,}", "Use a smaller one.")
        if self.kind == "json_schema":
            self._check_schema()
        if self.kind != "regex":
            self._check_divisors()

    def __str__(self) -> str:
        return f"{self.kind} of {len(self.text)} characters"

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """JSON values of a schema, which is an object or its JSON text."""
        if isinstance(schema, str):
            return cls("json_schema", schema)
        try:
            return cls("json_schema", json.dumps(schema, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            refuse("json_schema", error, "a JSON object", "Correct the schema.")

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_schema", _ANY_OBJECT)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Texts that a regular expression matches as a whole (Rust's syntax: no look-around, no back-references)."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of some texts."""
        if not texts or not all(isinstance(text, str) and text for text in texts):
            refuse("choice", "no texts, or an empty one", "texts of a character or more", "Give some.")
        return cls("regex", "|".join(f"({_literal(text)})" for text in texts))

    @classmethod
    def gbnf(cls, grammar: str) -> Grammar:
        """Texts of a grammar as llama.cpp writes them (`root ::= ...`), or of a Lark grammar.

        Raises:
            UsageError: it is neither; tokens by name or id are not supported.
            EngineError: llguidance is not installed.
        """
        lark = cls("lark", grammar)
        try:
            from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark, is_lark_syntax
        except ImportError as error:
            fix = 'Install it: pip install "edgekv[serve]"'
            raise EngineError("llguidance", got=error, expected="the library", fix=fix) from None
        try:
            return lark if is_lark_syntax(grammar) else cls("lark", gbnf_to_lark(grammar))
        except (GbnfToLarkError, ValueError, KeyError, IndexError, RecursionError) as error:
            got = " ".join(str(error).split())[:200] or type(error).__name__
            return refuse("grammar", got, "a grammar of llama.cpp, or of Lark", "Correct or simplify it.")

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Texts of a Lark grammar."""
        return cls("lark", grammar)

    @property
    def field(self) -> str:
        """Its name in errors."""
        return "grammar" if self.kind == "lark" else self.kind

    def schema(self) -> dict[str, Any]:
        """The schema as an object; of the kind `json_schema` only."""
        schema = json.loads(self.text)
        return {} if schema is True else schema

    def _check_schema(self) -> None:
        depth, deepest, in_string, escaped = 0, 0, False, False
        for character in self.text:
            if in_string:
                in_string, escaped = escaped or character != '"', character == "\\" and not escaped
            elif character == '"':
                in_string = True
            elif character in "{[":
                deepest = max(deepest, depth := depth + 1)
            elif character in "}]":
                depth -= 1
        if deepest > MAX_GRAMMAR_DEPTH:
            refuse(self.field, f"{deepest} levels", f"at most {MAX_GRAMMAR_DEPTH}", "Nest less, or use $ref.")
        try:
            schema = json.loads(self.text)
        except ValueError as error:
            refuse(self.field, error, "JSON", "Correct the schema.")
        if schema is not True and not isinstance(schema, dict):
            got = "false, which nothing satisfies" if schema is False else type(schema).__name__
            refuse(self.field, got, "a JSON object", 'Give a schema such as {"type": "object"}.')
        if not has_finite_answer(schema):
            got = "a recursion without end: every instance contains another one"
            refuse(self.field, got, "a schema with a finite instance", "Make a property of the recursion optional.")

    def _check_divisors(self) -> None:
        """Intersected divisors multiply, so the limit is on the product of all that occur."""
        text = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), self.text)
        states = 1
        for written in {match[1] for match in _DIVISOR.finditer(text)}:
            try:
                if not -_MAX_DECADES < math.log10(abs(float(written))) < _MAX_DECADES:
                    raise ValueError
                divisor = abs(Fraction(written))
            except (ValueError, ZeroDivisionError):
                refuse(self.field, f"multipleOf {written}", "a decimal number above 0", "Use a simpler divisor.")
            states *= divisor.numerator
        if states > MAX_DIVISOR:
            got, expected = f"multipleOf with {states:,} remainders", f"at most {MAX_DIVISOR:,} in all"
            refuse(self.field, got, expected, "Use smaller divisors, or none.")


def _literal(text: str) -> str:
    """A text as a regular expression in Rust's syntax: what is neither a letter nor a digit is escaped."""
    return "".join(
        character
        if character.isalnum() or (not character.isascii() and character.isprintable())
        else f"\\x{{{ord(character):x}}}"
        for character in text
    )
