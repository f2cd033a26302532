"""Texts that end an answer, or mark a part of it, found as it is generated."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.errors import UsageError


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
        self.found = False

    @property
    def withholds(self) -> bool:
        """Whether some text was not returned."""
        return self.found or bool(self._held)

    def push(self, piece: str) -> str:
        """The text that can be printed now; empty once `found` is true."""
        if self.found or not self._sequences:
            return "" if self.found else piece
        text = self._held + piece
        ends = [(at + len(s), at) for s in self._sequences if (at := text.find(s)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max(overlap(text, s) for s in self._sequences)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The withheld text, at the end."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, sequence: str) -> int:
    """Length of the longest suffix of the text that is a prefix of the sequence."""
    longest = min(len(text), len(sequence) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(sequence[:n])), 0)
