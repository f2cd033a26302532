"""The text to print of a generation's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgekv.text.detokenizer import Detokenizer, StopSequences
from edgekv.text.tools import ToolCall, ToolCallReader

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TextStream:
    """Turns tokens into text, without the calls of tools, up to a stop text."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str], reader: ToolCallReader | None
    ) -> None:
        """Continue the text of a prompt.

        Args:
            tokenizer: turns tokens into text.
            prompt: token ids.
            stop: texts that end it.
            reader: of the calls of tools; None if there are no tools.

        Raises:
            UsageError: the tokenizer fails.
        """
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopSequences(stop)
        self._reader = reader
        self._has_skipped = False

    @property
    def is_whole(self) -> bool:
        """Whether the text returned is that of all tokens: none is withheld, cut off or part of a call."""
        return not (self._has_skipped or self._reader or self._stops.withholds or self._detokenizer.withholds)

    @property
    def has_stopped(self) -> bool:
        """Whether a stop text was found."""
        return self._stops.found

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools so far."""
        return () if self._reader is None else tuple(self._reader.calls)

    def push(self, token: int, *, is_text: bool) -> str:
        """The text that can be printed after a token; one that ends a text is none itself."""
        self._has_skipped |= not is_text
        piece = self._detokenizer.push(token) if is_text else ""
        return self._stops.push(piece if self._reader is None else self._reader.push(token, piece))

    def flush(self, *, cut: bool) -> str:
        """The withheld text, at the end; without the last character if it is incomplete because the text is `cut`."""
        rest = self._detokenizer.flush(cut=cut)
        if self._reader is not None:
            rest = self._reader.push(-1, rest) + self._reader.flush()
        return self._stops.push(rest) + self._stops.flush()
