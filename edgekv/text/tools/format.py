"""How models write calls of tools, recognized by the markers in the text of their chat templates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from edgekv.spec.chat import DEFAULT, ChatTemplates


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes a call: `open body close`.

    Attributes:
        name: of the family.
        body: `object`: a JSON object with the name and the arguments; `named`: the name, `middle`, and the arguments
            as JSON; `gemma`: the name, and the arguments in Gemma's notation.
        open: text before a call; empty if a call is the whole answer.
        close: text after it.
        separator: text between calls of one block; None if each call has a block of its own.
        join: text between blocks; None if there can be only one.
        key: of the arguments in the JSON object.
        middle: text between the name and the arguments.
        quote: text around strings in Gemma's notation.
        tag: a marker that may precede a call without `open`.
        reply: text before an answer without calls, which is then a string of JSON with `}` after it; empty if such an
            answer is plain text.
    """

    name: str
    body: Literal["object", "named", "gemma"]
    open: str
    close: str
    separator: str | None = None
    join: str | None = None
    key: str = "arguments"
    middle: str = ""
    quote: str = ""
    tag: str = ""
    reply: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts with markers."""
        return (self.open, self.close, self.middle, self.quote, self.tag)


HERMES = CallFormat("hermes", "object", "<tool_call>\n", "\n</tool_call>", join="\n")
"""Hermes, Qwen 2.5 and 3, and many others."""
LLAMA3 = CallFormat("llama3", "object", "", "", key="parameters", tag="<|python_tag|>")
MISTRAL = CallFormat("mistral", "object", "[TOOL_CALLS][", "]", separator=", ")
MISTRAL_ARGS = CallFormat("mistral", "named", "[TOOL_CALLS]", "", join="", middle="[ARGS]")
GEMMA = CallFormat("gemma", "gemma", "<start_function_call>call:", "<end_function_call>", join="", quote="<escape>")
"""FunctionGemma: https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices"""
GEMMA4 = CallFormat("gemma", "gemma", "<|tool_call>call:", "<tool_call|>", join="", quote='<|"|>')
"""https://ai.google.dev/gemma/docs/capabilities/text/function-calling-gemma4"""


GENERIC = CallFormat("json", "object", '{"tool_call": ', "}", reply='{"response": ')
"""For templates without known markers: the whole answer is JSON, as llama.cpp has it for such models.

One call an answer: models that were not trained for calls repeat them for as long as they may.
"""


def find_format(templates: ChatTemplates) -> CallFormat:
    """The format of a model's calls: that of its templates, or the generic one."""
    return native_format(templates) or GENERIC


def native_format(templates: ChatTemplates) -> CallFormat | None:
    """The format whose markers a model's templates have; None if they have none that is known."""
    return _format_of(templates.templates.get("tool_use") or templates.templates.get(DEFAULT, ""))


def _format_of(source: str) -> CallFormat | None:
    if GEMMA4.quote in source and "<|tool_call>" in source:
        return GEMMA4
    if "<start_function_call>" in source:
        return GEMMA
    if "[TOOL_CALLS]" in source:
        if "[ARGS]" in source:
            return MISTRAL_ARGS
        return replace(MISTRAL, open="[TOOL_CALLS] [") if "[TOOL_CALLS] [" in source else MISTRAL
    if "<tool_call>" in source:
        return None if "<function=" in source else HERMES
    if LLAMA3.tag in source or ('"parameters": ' in source and "tools" in source):
        return LLAMA3
    return None
