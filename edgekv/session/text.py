"""From tokens to text that may be printed at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgekv.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_CHARACTER_BYTES = 4


class Detokenizer:
    """Turns a stream of tokens into pieces of text that never end within a UTF-8 character.

    A piece is what the decoding of the last few tokens gains by the new one; while it ends in an incomplete
    character, nothing is given out. The tokens before it are decoded with it, because some tokenizers write the
    first word of a text without its space.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt)
        self._start = 0
        self._printed = self._last_whole()

    def push(self, token: int) -> str:
        """The text that may be printed now that this token has come."""
        self._tokens.append(token)
        piece = self._piece()
        if not piece or piece.endswith(_INCOMPLETE):
            return ""
        self._start, self._printed = self._printed, len(self._tokens)
        return piece

    def flush(self) -> str:
        """What is left at the end; an incomplete character is replaced by U+FFFD."""
        piece = self._piece()
        self._start, self._printed = self._printed, len(self._tokens)
        return piece

    def _piece(self) -> str:
        before = self._decode(self._tokens[self._start : self._printed])
        return self._decode(self._tokens[self._start :])[len(before) :]

    def _last_whole(self) -> int:
        """Tokens of the prompt up to its last whole character: one that it begins belongs to the first piece."""
        end = len(self._tokens)
        for length in range(end, max(end - _CHARACTER_BYTES, -1), -1):
            if not self._decode(self._tokens[:length]).endswith(_INCOMPLETE):
                return length
        return end

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens)
        return text


class StopSequences:
    """Passes text on until one of several sequences is complete, and holds back what may begin one.

    The sequence that is complete first ends the text, at its begin; of two that are complete at once the longer.
    """

    def __init__(self, sequences: Sequence[str]) -> None:
        """Look for these sequences.

        Raises:
            UsageError: one of them is empty.
        """
        if "" in sequences:
            raise UsageError("stop", got="an empty text", expected="one character or more", fix="Leave it out.")
        self._sequences = tuple(sequences)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that may be printed now; nothing any more once `found` is true."""
        if self.found or not self._sequences:
            return "" if self.found else piece
        text = self._held + piece
        ends = [(at + len(s), at) for s in self._sequences if (at := text.find(s)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max(_overlap(text, s) for s in self._sequences)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, sequence: str) -> int:
    """Length of the longest end of the text that begins the sequence."""
    longest = min(len(text), len(sequence) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(sequence[:n])), 0)
