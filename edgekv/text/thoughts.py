"""The thoughts of an answer: text between two marks before the answer proper, as a model's chat template has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from edgekv.spec.chat import DEFAULT, ChatTemplates
from edgekv.text.stops import overlap


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """The marks around thoughts.

    Attributes:
        open: text before them, at the beginning of an answer or at the end of its prompt.
        close: text after them.
    """

    open: str
    close: str

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends within thoughts."""
        return prompt.rstrip().endswith(self.open)


_FORMATS = (ThoughtFormat("<|channel>thought", "<channel|>"), ThoughtFormat("<think>", "</think>"))
"""Gemma 4 (https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4); Qwen 3, DeepSeek and many others."""


def thought_format(templates: ChatTemplates) -> ThoughtFormat | None:
    """The format whose marks a model's template has; None if it has none that is known."""
    source = templates.templates.get(DEFAULT, "")
    # A template that leaves the thoughts of earlier turns out may name the closing mark alone.
    return next((thought for thought in _FORMATS if thought.close in source), None)


class ThoughtReader:
    """Divides an answer into thoughts and text, as it is generated; space around the marks is part of neither."""

    def __init__(self, form: ThoughtFormat, special: Mapping[int, str], *, is_open: bool) -> None:
        """Start an answer.

        Args:
            special: the special tokens, which have no text in the answer.
            is_open: whether the prompt ends within thoughts.
        """
        self._form = form
        self._special = special
        self._place: Literal["before", "within", "behind", "text"] = "within" if is_open else "before"
        self._held = ""
        self._has_marks = is_open
        self._has_thought = False

    @property
    def hides(self) -> bool:
        """Whether the text given so far is not that of all tokens."""
        return self._has_marks or bool(self._held)

    @property
    def is_within(self) -> bool:
        """Whether the last token was one of thoughts, and did not end them."""
        return self._place == "within"

    def push(self, token: int, text: str) -> tuple[str, str]:
        """The thoughts and the text that a token adds.

        Args:
            text: that it adds, as a `Detokenizer` gives it.
        """
        if self._place == "text":
            return "", text
        mark = self._special.get(token)
        is_own = mark is not None and (self._form.open.startswith(mark) or mark == self._form.close)
        self._held += mark if is_own and mark is not None else text
        if self._place == "before":
            begun = self._held.lstrip()
            if begun.startswith(self._form.open):
                self._place, self._held = "within", begun.removeprefix(self._form.open)
                self._has_marks = True
            elif not self._form.open.startswith(begun) or (mark is not None and not is_own):
                return "", self._rest()
        thoughts = self._thoughts() if self._place == "within" else ""
        return thoughts, self._text() if self._place == "behind" else ""

    def flush(self) -> tuple[str, str]:
        """The thoughts and the text that were withheld, at the end."""
        if self._place == "within":
            return self._rest().rstrip(), ""
        return "", self._rest() if self._place == "before" else ""

    def _thoughts(self) -> str:
        """Those that can be shown: without space at their ends, and without what may be the closing mark."""
        if not self._has_thought:
            self._held = self._held.lstrip()
        whole, close, rest = self._held.partition(self._form.close)
        if close:
            self._place, self._held = "behind", rest
            return whole.rstrip()
        shown = self._held[: len(self._held) - overlap(self._held, self._form.close)].rstrip()
        self._held = self._held[len(shown) :]
        self._has_thought |= bool(shown)
        return shown

    def _text(self) -> str:
        """What follows the thoughts, without space before it."""
        self._held = self._held.lstrip()
        return self._rest() if self._held else ""

    def _rest(self) -> str:
        """What was withheld; from here on, everything is text."""
        self._place, held, self._held = "text", self._held, ""
        return held
