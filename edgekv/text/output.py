"""The output of a model: which tokens, their text, and when it ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgekv.text.constraint import Constraint
from edgekv.text.params import SamplingParams
from edgekv.text.sampler import Sampler, TokenChoice
from edgekv.text.stream import Detokenizer, StopSequences
from edgekv.text.tools import ToolCall, ToolCallReader

if TYPE_CHECKING:
    from tokenizers import Tokenizer

StopReason = Literal["eos", "length", "stop", "context", "grammar"]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        id: in the vocabulary.
        text: text to print now. Empty while a character or a possible stop text is incomplete; the last token includes
            all text withheld so far.
        logits: of the step, `[V]` in float32, before any processor; None unless they were asked for.
        tool_calls: the calls that this token completes; their notation is not part of any `text`.
    """

    id: int
    text: str
    logits: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    tool_calls: tuple[ToolCall, ...] = ()


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


class Output:
    """Chooses the tokens of an output, turns them into text, and knows when it ends.

    Attributes:
        tokens: generated so far.
        stop_reason: why the last one was the last; None before.
        sampler: chooses tokens by logits.
        choice: chooses tokens that may be forced.
        stream: their text.
        constraint: of the text; None for free text.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        sampler: Sampler,
        tokenizer: Tokenizer,
        eos: Collection[int],
        bound: tuple[Constraint | None, ToolCallReader | None],
        *,
        returns_logits: bool = False,
    ) -> None:
        """Begin with no token.

        Args:
            prompt: token ids.
            params: when to stop.
            sampler: chooses tokens by logits.
            tokenizer: of the bundle.
            eos: tokens that end a text.
            bound: see `Texts.bind`.
            returns_logits: whether each token carries the logits of its step.

        Raises:
            UsageError: the tokenizer fails.
        """
        self.constraint, reader = bound
        self.tokens: list[int] = []
        self.stop_reason: StopReason | None = None
        self.sampler = sampler
        self.choice = TokenChoice(sampler, self.constraint)
        self.stream = TextStream(tokenizer, prompt, params.stop, reader)
        self._prompt = prompt
        self._most_tokens = params.max_new_tokens
        self._eos = frozenset() if params.ignore_eos else frozenset(eos)
        self._returns_logits = returns_logits

    @property
    def needs_logits(self) -> bool:
        """Whether the next token needs logits: the first one, one that is not forced, and all if they are returned."""
        return self.choice.needs_logits or not self.tokens or self._returns_logits

    def choose(self, logits: NDArray[Any] | None) -> int:
        """The next token.

        Args:
            logits: after the text, as integers `[V]`; None only if it needs none.

        Raises:
            UsageError: a logits processor left nothing to choose from.
        """
        token = self.choice.next(logits, self._prompt, self.tokens)
        self.tokens.append(token)
        return token

    def say(self, token: int, logits: NDArray[Any] | None, *, is_full: bool) -> Token:
        """The chosen token with the text to print now; it may be the last one.

        Args:
            token: the last of `tokens`.
            logits: that it was chosen by.
            is_full: whether the context has no room for a token behind it.
        """
        stream = self.stream
        known = len(stream.tool_calls)
        is_end = token in self._eos
        text = stream.push(token, is_text=not is_end)
        if is_end:
            self.stop_reason = "eos"
        elif stream.has_stopped:
            self.stop_reason = "stop"
        elif self.choice.is_complete:
            self.stop_reason = "grammar"
        elif len(self.tokens) == self._most_tokens:
            self.stop_reason = "length"
        elif is_full:
            self.stop_reason = "context"
        if self.stop_reason is not None:
            text += stream.flush(cut=self.stop_reason in ("length", "context"))
        real = self.sampler.real(logits) if self._returns_logits and logits is not None else None
        return Token(token, text, real, stream.tool_calls[known:])
