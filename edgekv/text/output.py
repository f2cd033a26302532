"""The output of a model: which tokens, their text, and when it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import UsageError
from edgekv.spec.text import TOKENIZER, refuse_panic
from edgekv.text.constraint import Constraint
from edgekv.text.params import SamplingParams
from edgekv.text.sampler import Sampler
from edgekv.text.stops import SpecialStops, StopSequences
from edgekv.text.thoughts import ThoughtReader
from edgekv.text.tools import ToolCall, ToolCallReader

if TYPE_CHECKING:
    from tokenizers import Tokenizer

StopReason = Literal["eos", "length", "stop", "context", "grammar"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_OPEN_BYTES = 3
"""Bytes of an incomplete UTF-8 character, at most."""
_MAX_PENDING_TOKENS = 8
_CONTEXT_TOKENS = 64


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
        special: texts of special tokens by their ids, which stop texts may have.
    """

    calls: ToolCallReader | None = None
    thoughts: ThoughtReader | None = None
    special: Mapping[int, str] = field(default_factory=dict)


NO_READERS = AnswerReaders()


class Output:
    """Chooses the tokens of an output, turns them into text, and knows when it ends.

    Attributes:
        tokens: generated so far.
        texts: of these tokens, as they were given.
        stop_reason: why the last one was the last; None before.
        sampler: chooses tokens by logits.
        stream: their text.
        constraint: of the text; None for free text. The tokens that it forces are not sampled.
        forced_tokens: how many it has forced.
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
        self.texts: list[str] = []
        self.stop_reason: StopReason | None = None
        self.sampler = sampler
        self.forced_tokens = 0
        self.stream = TextStream(tokenizer, prompt, params.stop, readers)
        self._prompt = prompt
        self._max_tokens = params.max_new_tokens
        self._eos = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos))
        self._returns_logits = returns_logits
        self._forced: deque[int] = deque()  # tokens of the text that are known already

    @property
    def needs_logits(self) -> bool:
        """Whether the next token needs logits: the first one, one that is not forced, and all if they are returned."""
        return not self._forced or not self.tokens or self._returns_logits

    def choose(self, logits: NDArray[Any] | None) -> int:
        """The next token.

        Args:
            logits: after the text, as integers `[V]`; None only if it needs none.

        Raises:
            UsageError: a logits processor left nothing to choose from.
        """
        constraint = self.constraint
        if constraint is None:
            assert logits is not None
            token = self.sampler(logits, self._prompt, self.tokens)
        else:
            if not self._forced and not self.tokens:
                self._forced.extend(constraint.forced())
            if self._forced:
                token = self._forced.popleft()
                self.forced_tokens += 1
            else:
                assert logits is not None
                token = self.sampler(logits, self._prompt, self.tokens, constraint.allowed())
            constraint.push(token)
            if not self._forced:
                self._forced.extend(constraint.forced())
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
        elif self.constraint is not None and self.constraint.is_complete:
            self.stop_reason = "grammar"
        elif len(self.tokens) == self._max_tokens:
            self.stop_reason = "length"
        elif is_full:
            self.stop_reason = "context"
        if self.stop_reason is not None:
            rest, more = stream.flush(cut=self.stop_reason in ("length", "context"))
            text, thoughts = text + rest, thoughts if more is None else (thoughts or "") + more
        self.texts.append(text)
        real = self.sampler.real(logits) if self._returns_logits and logits is not None else None
        return Token(token, text, real, stream.tool_calls[known:], thoughts)


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
        self._special = SpecialStops(stop, readers.special) if stop else None
        self._stops = None if self._special is None else StopSequences(self._special.sequences)
        self._calls = readers.calls
        self._thoughts = readers.thoughts
        self._has_skipped = False

    @property
    def is_whole(self) -> bool:
        """Whether the text returned is that of all tokens: none is withheld, cut off, or part of a call or thoughts."""
        hides = self._calls is not None or (self._thoughts is not None and self._thoughts.hides)
        stops = self._stops is not None and self._stops.withholds
        return not (self._has_skipped or hides or stops or self._detokenizer.withholds)

    @property
    def has_stopped(self) -> bool:
        """Whether a stop text was found."""
        return self._stops is not None and self._stops.has_matched

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools so far."""
        return () if self._calls is None else tuple(self._calls.calls)

    def push(self, token: int, *, is_text: bool) -> tuple[str, str | None]:
        """The text and the thoughts that can be shown after a token; one that ends a text is none itself."""
        self._has_skipped |= not is_text
        piece = self._detokenizer.push(token) if is_text else ""
        if self._special is None:
            return self._divided(token, piece)
        return self._shown(*self._divided(token, piece + self._special.text(token) if is_text else ""))

    def flush(self, *, cut: bool) -> tuple[str, str | None]:
        """What was withheld, at the end; without the last character if it is incomplete because the text is `cut`."""
        text, thoughts = self._divided(-1, self._detokenizer.flush(cut=cut))
        if self._thoughts is not None:
            more, rest = self._thoughts.flush()
            thoughts = (thoughts or "") + more if more else thoughts
            text += self._called(-1, rest)
        if self._calls is not None:
            text += self._until_stop(self._calls.flush())
        return self._shown(text + ("" if self._stops is None else self._stops.flush()), thoughts)

    def _shown(self, text: str, thoughts: str | None) -> tuple[str, str | None]:
        """Text and thoughts without what stands for special tokens."""
        if self._special is None:
            return text, thoughts
        return self._special.shown(text), None if thoughts is None else self._special.shown(thoughts)

    def _divided(self, token: int, piece: str) -> tuple[str, str | None]:
        if self._thoughts is None:
            return self._called(token, piece), None
        was_within = self._thoughts.is_within
        thoughts, text = self._thoughts.push(token, piece)
        return self._called(token, text), thoughts if thoughts or was_within or self._thoughts.is_within else None

    def _called(self, token: int, text: str) -> str:
        """Text up to a stop text, without calls."""
        return self._until_stop(text if self._calls is None else self._calls.push(token, text))

    def _until_stop(self, text: str) -> str:
        """Text up to a stop text."""
        return text if self._stops is None else self._stops.push(text)


class Detokenizer:
    """Turns a stream of tokens into pieces of text that never end within a UTF-8 character.

    A piece is the text that the new token adds. At most three bytes that may still become a character are withheld. The
    tokens before the new ones are decoded with them, because some tokenizers drop the space before the first word of a
    text.

    Attributes:
        withholds: whether the text returned lacks some of the tokens' text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        """Continue the text of a prompt.

        Args:
            tokenizer: turns tokens into text.
            prompt: token ids.
            skip_special_tokens: whether special tokens have no text.

        Raises:
            UsageError: the tokenizer fails.
        """
        self._decoded = partial(decode, tokenizer, skip_special_tokens=skip_special_tokens)
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
        tokens = self._tokens
        before, text = self._decoded(tokens[start:cut]), self._decoded(tokens[start:])
        # Byte tokens of a SentencePiece vocabulary turn a whole run into U+FFFD when one of them is wrong.
        return text[len(before) :] if text.startswith(before) else self._decoded(tokens[cut:])

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
            if not self._decoded(self._tokens[:length]).endswith(_REPLACEMENT):
                return length
        return end


def decode(tokenizer: Tokenizer, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """The text of tokens, by default without special ones.

    Raises:
        UsageError: the tokenizer fails.
    """
    try:  # twice a token: no context manager
        text: str = tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
    except BaseException as panic:
        refuse_panic(panic, TOKENIZER, UsageError)
        raise
    return text
