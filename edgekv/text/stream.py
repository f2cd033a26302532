"""From tokens to text that can be printed immediately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgekv.errors import UsageError
from edgekv.spec.text import decode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_OPEN_BYTES = 3
"""Bytes of an incomplete UTF-8 character, at most."""
_MAX_PENDING_TOKENS = 8
_CONTEXT_TOKENS = 64


class Detokenizer:
    """Turns a stream of tokens into pieces of text that never end within a UTF-8 character.

    A piece is the text that the new token adds. At most three bytes that may still become a character are withheld. The
    tokens before the new ones are decoded with them, because some tokenizers drop the space before the first word of a
    text.

    Attributes:
        withholds: whether the text returned lacks some of the tokens' text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """Continue the text of a prompt.

        Raises:
            UsageError: the tokenizer fails.
        """
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-_CONTEXT_TOKENS:])
        self._start = 0  # decoding begins with this token
        self._whole = self._last_whole()  # the text of the tokens before this one was returned
        self.withholds = False
        self._given = 0  # characters of the tokens from `_whole` on that were returned

    def push(self, token: int) -> str:
        """The text that can be printed after this token."""
        self._tokens.append(token)
        text = self._added_after(self._start, self._whole)
        held = len(text) - len(text.rstrip(_REPLACEMENT))
        self.withholds = held > 0 or not text
        if not self.withholds:
            return self._take(text)
        ready = text[self._given : max(self._given, len(text) - min(held, _OPEN_BYTES))]
        self._given += len(ready)
        if len(self._tokens) - self._whole > _MAX_PENDING_TOKENS:
            self._advance(text)
        return ready

    def flush(self, *, cut: bool = False) -> str:
        """The remaining text at the end; an incomplete character becomes U+FFFD, or nothing if the text is `cut`."""
        text = self._added_after(self._start, self._whole)
        piece = self._take(text)
        self.withholds = False
        if not cut:
            return piece
        incomplete = min(len(text) - len(text.rstrip(_REPLACEMENT)), _OPEN_BYTES, len(piece))
        self.withholds = incomplete > 0
        return piece[: len(piece) - incomplete]

    def _take(self, text: str) -> str:
        piece = text[self._given :]
        self._start, self._whole, self._given = self._whole, len(self._tokens), 0
        return piece

    def _added_after(self, start: int, cut: int) -> str:
        """The text that the tokens from `cut` on add to the tokens from `start` on."""
        tokens, tokenizer = self._tokens, self._tokenizer
        before, text = decode(tokenizer, tokens[start:cut]), decode(tokenizer, tokens[start:])
        # Byte tokens of a SentencePiece vocabulary turn a whole run into U+FFFD when one of them is wrong.
        return text[len(before) :] if text.startswith(before) else decode(tokenizer, tokens[cut:])

    def _advance(self, text: str) -> None:
        """Stop decoding tokens whose text is final: a long run of invalid bytes has no complete character."""
        for cut in range(len(self._tokens) - _OPEN_BYTES - 1, self._whole, -1):
            rest = self._added_after(self._whole, cut)
            settled = len(text) - len(rest)
            if settled <= self._given and text.endswith(rest):
                self._start, self._whole, self._given = self._whole, cut, self._given - settled
                return

    def _last_whole(self) -> int:
        """Tokens of the prompt up to its last complete character; an incomplete one belongs to the first piece."""
        end = len(self._tokens)
        for length in range(end, max(end - _OPEN_BYTES - 1, -1), -1):
            if not decode(self._tokenizer, self._tokens[:length]).endswith(_REPLACEMENT):
                return length
        return end


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
