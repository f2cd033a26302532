"""What an answer has to be: `response_format`, and the tools that it may call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from edgekv.serve.errors import refused
from edgekv.session.grammar import Grammar

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
    """

    grammar: Grammar | None = None

    @classmethod
    def of(cls, wanted: ResponseFormat | None) -> AnswerForm:
        """The form that a request asks for.

        Raises:
            ApiError: an unknown format, or one without its schema.
            UsageError: a schema that is wrong or too large.
        """
        if wanted is None or wanted.type == "text":
            return cls()
        if wanted.type == "json_object":
            return cls(Grammar.json_object())
        if wanted.type != "json_schema":
            found, fix = repr(wanted.type)[:40], "Leave it out for text."
            raise refused("response_format.type", got=found, expected=" or ".join(_KINDS), fix=fix)
        if wanted.json_schema is None or wanted.json_schema.schema is None:
            raise refused("response_format.json_schema", got="no schema", expected="one", fix="Add schema.")
        return cls(Grammar.json_schema(wanted.json_schema.schema))
