"""Texts that no model is calibrated on: prose, and a conversation in a checkpoint's chat template.

The tokens that a template adds (roles, line ends, marks of turns) are few and alike in every chat, so what they lose is
measured apart too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import QualityRecord
from edgekv.errors import UsageError
from edgekv.machine.decoding import DECODERS
from edgekv.spec.chat import ChatTemplates
from edgekv.spec.text import encode
from exporters.inspect.tally import Tally, TokenSums
from exporters.inspect.wikitext import Window, measured_windows
from exporters.quantize.calibrate import cut_ranges
from exporters.quantize.reference import Floats

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TextName = Literal["prose", "chat"]
MEASURED_TOKENS: dict[TextName, int] = {"prose": 512, "chat": 256}
"""Predicted tokens of each text."""

_PROSE, _CHAT = "held_out.txt", "held_out_chat.json"
_FOLDER = "exporters.quantize"


def held_out_prose() -> str:
    """The prose."""
    return resources.files(_FOLDER).joinpath(_PROSE).read_text("utf-8")


def held_out_chat(templates: ChatTemplates | None) -> str | None:
    """The conversation in a chat template; None without one, or with one that refuses it."""
    if templates is not None:
        with suppress(UsageError):
            return templates.render(_messages(), add_generation_prompt=False)
    return None


@dataclass(frozen=True, slots=True)
class HeldOutChat:
    """The conversation as tokens.

    Attributes:
        ids: of the whole text.
        template: places of the tokens of the template alone, ascending.
    """

    ids: Sequence[int]
    template: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, templates: ChatTemplates | None) -> HeldOutChat | None:
        """As `held_out_chat`."""
        rendered = held_out_chat(templates)
        if rendered is None:
            return None
        ids = encode(tokenizer, rendered, field="text", add_special_tokens=False)
        return cls(ids, template_tokens(tokenizer, rendered))

    def windows(self, length: int, first: Sequence[int], tokens: int = MEASURED_TOKENS["chat"]) -> list[ChatWindow]:
        """Windows of at most `length` ids with `tokens` predicted tokens in all; see `cut_windows`."""
        return chat_windows(self.ids, self.template, length, first, tokens)


@dataclass(frozen=True, slots=True)
class ChatWindow:
    """A window of a conversation.

    Attributes:
        window: the tokens.
        of_template: whether each of its targets is a token of the template alone.
    """

    window: Window
    of_template: NDArray[np.bool_]


def chat_windows(
    ids: Sequence[int], template: Iterable[int], length: int, first: Sequence[int], tokens: int
) -> list[ChatWindow]:
    """As `HeldOutChat.windows`, of token ids and the places of the template's tokens."""
    ranges = cut_ranges(ids, length, first)
    windows = measured_windows([np.array([*first, *ids[part.start : part.stop]]) for part in ranges], first, tokens)
    places, skipped = np.array([*template], np.int64), max(1, len(first)) - len(first)
    chats = []
    for window, part in zip(windows, ranges, strict=False):
        targets = part.start + skipped + np.arange(len(window.targets))
        chats.append(ChatWindow(window, np.isin(targets, places)))
    return chats


def template_tokens(tokenizer: Tokenizer, rendered: str) -> tuple[int, ...]:
    """Places of the tokens of the rendered conversation that hold nothing of its messages."""
    spans, at = list[tuple[int, int]](), 0
    for message in _messages():
        content = message["content"].strip()
        start = rendered.find(content, at)
        if start >= 0:  # a template may change a message: then its tokens count as the template's
            at = start + len(content)
            spans.append((start, at))
    offsets = tokenizer.encode(rendered, add_special_tokens=False).offsets
    return tuple(
        place
        for place, (start, end) in enumerate(offsets)
        if all(end <= span_start or start >= span_end for span_start, span_end in spans)
    )


@dataclass(slots=True)
class ChatTally:
    """What a bundle loses on the conversation, and on the tokens of the template alone."""

    _chat: Tally = field(default_factory=Tally)
    _template: Tally = field(default_factory=Tally)

    def add(self, window: ChatWindow, expected: Floats, actual: Floats) -> None:
        """See `Tally.add`."""
        sums = TokenSums(window.window)
        sums.add(expected, actual)
        self.add_sums(window, sums)

    def add_sums(self, window: ChatWindow, sums: TokenSums) -> None:
        """See `Tally.add_sums`."""
        self._chat.add_sums(sums)
        if window.of_template.any():
            self._template.add_sums(sums, window.of_template)

    @property
    def records(self) -> tuple[QualityRecord, ...]:
        """One for the chat, and one for its template."""
        named: tuple[tuple[Literal["chat", "template"], Tally], ...] = (
            ("chat", self._chat),
            ("template", self._template),
        )
        return tuple(tally.record(name) for name, tally in named if tally)


def measure_chat(windows: Sequence[ChatWindow], logits: Iterable[tuple[Floats, Floats]]) -> tuple[QualityRecord, ...]:
    """What one model loses against another on a conversation; nothing without windows.

    Args:
        windows: of the conversation.
        logits: of both models for each window, `[T, V]`.
    """
    tally = ChatTally()
    for window, (expected, actual) in zip(windows, logits, strict=True):
        tally.add(window, expected, actual)
    return tally.records


def _messages() -> list[dict[str, str]]:
    content = resources.files(_FOLDER).joinpath(_CHAT).read_bytes()
    return DECODERS[list[dict[str, str]]].decode(content)
