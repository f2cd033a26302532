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
from edgekv.text.thoughts import ThoughtReader
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
        thoughts: text of the model's thoughts to show now, which is not part of any `text`; None for tokens of none.
    """

    id: int
    text: str
    logits: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    tool_calls: tuple[ToolCall, ...] = ()
    thoughts: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerReaders:
    """What finds the parts of an answer that are not its text.

    Attributes:
        calls: of tools; None if there are no tools.
        thoughts: before the text; None if they are not looked for.
    """

    calls: ToolCallReader | None = None
    thoughts: ThoughtReader | None = None


NO_READERS = AnswerReaders()


class TextStream:
    """Turns tokens into text, without thoughts and the calls of tools, up to a stop text."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str], readers: AnswerReaders
    ) -> None:
        """Continue the text of a prompt.

        Args:
            tokenizer: turns tokens into text.
            prompt: token ids.
            stop: texts that end it.
            readers: find what is no text.

        Raises:
            UsageError: the tokenizer fails.
        """
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopSequences(stop)
        self._calls = readers.calls
        self._thoughts = readers.thoughts
        self._has_skipped = False

    @property
    def is_whole(self) -> bool:
        """Whether the text returned is that of all tokens: none is withheld, cut off, or part of a call or thoughts."""
        hides = self._calls is not None or (self._thoughts is not None and self._thoughts.hides)
        return not (self._has_skipped or hides or self._stops.withholds or self._detokenizer.withholds)

    @property
    def has_stopped(self) -> bool:
        """Whether a stop text was found."""
        return self._stops.found

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools so far."""
        return () if self._calls is None else tuple(self._calls.calls)

    def push(self, token: int, *, is_text: bool) -> tuple[str, str | None]:
        """The text and the thoughts that can be shown after a token; one that ends a text is none itself."""
        self._has_skipped |= not is_text
        return self._divided(token, self._detokenizer.push(token) if is_text else "")

    def flush(self, *, cut: bool) -> tuple[str, str | None]:
        """What was withheld, at the end; without the last character if it is incomplete because the text is `cut`."""
        text, thoughts = self._divided(-1, self._detokenizer.flush(cut=cut))
        if self._thoughts is not None:
            more, rest = self._thoughts.flush()
            thoughts = (thoughts or "") + more if more else thoughts
            text += self._called(-1, rest)
        if self._calls is not None:
            text += self._stops.push(self._calls.flush())
        return text + self._stops.flush(), thoughts

    def _divided(self, token: int, piece: str) -> tuple[str, str | None]:
        if self._thoughts is None:
            return self._called(token, piece), None
        was_within = self._thoughts.is_within
        thoughts, text = self._thoughts.push(token, piece)
        return self._called(token, text), thoughts if thoughts or was_within or self._thoughts.is_within else None

    def _called(self, token: int, text: str) -> str:
        """Text up to a stop text, without calls."""
        return self._stops.push(text if self._calls is None else self._calls.push(token, text))


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
        constraint: Constraint | None = None,
        readers: AnswerReaders = NO_READERS,
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
            constraint: of the text; None for free text.
            readers: find what is no text.
            returns_logits: whether each token carries the logits of its step.

        Raises:
            UsageError: the tokenizer fails.
        """
        self.constraint = constraint
        self.tokens: list[int] = []
        self.stop_reason: StopReason | None = None
        self.sampler = sampler
        self.choice = TokenChoice(sampler, self.constraint)
        self.stream = TextStream(tokenizer, prompt, params.stop, readers)
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
        text, thoughts = stream.push(token, is_text=not is_end)
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
            rest, more = stream.flush(cut=self.stop_reason in ("length", "context"))
            text, thoughts = text + rest, thoughts if more is None else (thoughts or "") + more
        real = self.sampler.real(logits) if self._returns_logits and logits is not None else None
        return Token(token, text, real, stream.tool_calls[known:], thoughts)
