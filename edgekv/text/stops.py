"""Texts that end an answer, or mark a part of it, found as it is generated."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from edgekv.errors import UsageError

_FIRST_MARK, _MARKS = 0xD800, 0x800
"""Halves of surrogate pairs, which no text of tokens has."""


class StopSequences:
    """Passes text on until a stop text is complete, and withholds text that may be the start of one.

    The text ends before the stop text that is completed first; if two are, before the longer one.
    """

    def __init__(self, sequences: Sequence[str]) -> None:
        """Look for these texts.

        Raises:
            UsageError: one of them is empty.
        """
        if "" in sequences:
            raise UsageError("stop", got="an empty text", expected="one character or more", fix="Leave it out.")
        self._sequences = tuple(sequences)
        self._held = ""
        self.has_matched = False

    @property
    def withholds(self) -> bool:
        """Whether some text was not returned."""
        return self.has_matched or bool(self._held)

    def push(self, piece: str) -> str:
        """The text that can be printed now; empty once `has_matched` is true."""
        if self.has_matched or not self._sequences:
            return "" if self.has_matched else piece
        text = self._held + piece
        ends = [(at + len(s), at) for s in self._sequences if (at := text.find(s)) >= 0]
        if ends:
            self.has_matched, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max(overlap(text, s) for s in self._sequences)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The withheld text, at the end."""
        held, self._held = self._held, ""
        return held


class SpecialStops:
    """Stop texts with special tokens, which have no text in an answer: a character stands for each until it is shown.

    Attributes:
        sequences: the stop texts; a special token in them is written as text, or as that character.
    """

    def __init__(self, sequences: Sequence[str], special: Mapping[int, str]) -> None:
        """Look for special tokens.

        Args:
            sequences: stop texts.
            special: the texts of special tokens by their ids.
        """
        tokens = [token for token, text in special.items() if text and any(text in sequence for sequence in sequences)]
        self._marks = {token: chr(_FIRST_MARK + at) for at, token in enumerate(tokens[:_MARKS])}
        self._shown = dict.fromkeys(map(ord, self._marks.values()))
        marks = {special[token]: mark for token, mark in self._marks.items()}
        pattern = re.compile("|".join(re.escape(text) for text in sorted(marks, key=len, reverse=True)) or "(?!)")
        marked = (pattern.sub(lambda match: marks[match[0]], sequence) for sequence in sequences)
        self.sequences = tuple(dict.fromkeys([*sequences, *marked]))

    def text(self, token: int) -> str:
        """What stands for a token, if it is special and in a stop text."""
        return self._marks.get(token, "")

    def shown(self, text: str) -> str:
        """A text without what stands for special tokens."""
        return text.translate(self._shown) if self._shown else text


def overlap(text: str, sequence: str) -> int:
    """Length of the longest suffix of the text that is a prefix of the sequence."""
    longest = min(len(text), len(sequence) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(sequence[:n])), 0)
