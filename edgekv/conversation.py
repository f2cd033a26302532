"""A conversation on a model: its messages, and the tokens that its cache holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgekv.bundle import atomic_file
from edgekv.errors import UsageError
from edgekv.json_file import read_json
from edgekv.model import Model
from edgekv.session import Generation, GenerationStats, SamplingParams, Speculate, Token
from edgekv.spec.chat import Message, check_messages

_SEQUENCE = 0


class _Saved(msgspec.Struct, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]


class Conversation:
    """Turns of a user and a model. Each turn prefills only its new tokens; the cache has the others.

    Attributes:
        messages: the turns so far, as chat templates take them.
    """

    def __init__(
        self,
        model: Model,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        speculate: Speculate | None = None,
        lora: str | None = None,
    ) -> None:
        """Start a conversation.

        Args:
            model: a bundle with a chat template.
            system: the system prompt; None for the template's own.
            params: how to sample and when to stop; None for the model's defaults.
            speculate: how to draft tokens; None for no drafts.
            lora: adapters of the bundle, as `Model.generate` takes them; None for the base model.

        Raises:
            UsageError: the bundle has no chat template, or no such adapters.
        """
        self.messages: list[Message] = []
        self._model = model
        self._system = system
        self._params = params
        self._speculate = speculate
        self._lora = lora
        self._tokens: list[int] = []
        self._text = ""
        _ = model.chat_templates, model.open_lora(lora)  # refused now, not at the first turn
        self.reset()

    def reset(self) -> None:
        """Forget all turns but the system prompt."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._tokens, self._text = [], ""

    def say(self, content: str) -> Answer:
        """Add the user's turn. The answer is generated as it is read; an interrupted answer keeps its text so far.

        A turn whose answer is interrupted or fails before its first token is taken back.

        Raises:
            UsageError: the template refuses the conversation.
            ContextFullError: the conversation is longer than the context; the turn is not added.
        """
        messages = [*self.messages, {"role": "user", "content": content}]
        text = self._model.chat_templates.render(messages)
        tokens = self._model.encode_chat(text)
        if self._text and text.startswith(self._text):
            # Tokenizing generated text may give other tokens than those generated, so only new text is tokenized.
            tokens = [*self._tokens, *self._model.encode_chat(text[len(self._text) :])]
        generation = self._model.generate(
            tokens, self._params, sequence=_SEQUENCE, speculate=self._speculate, lora=self._lora
        )
        before, self.messages = self.messages, messages
        return Answer(self, before, text, generation)

    def save(self, path: Path) -> None:
        """Write the messages to a JSON file, atomically.

        Raises:
            UsageError: the file cannot be written.
        """
        try:
            with atomic_file(path) as partial:
                partial.write_bytes(msgspec.json.encode(_Saved(messages=[dict(each) for each in self.messages])))
        except OSError as error:
            raise UsageError(
                str(path), got=error.strerror, expected="a file that can be written", fix="Choose another place."
            ) from None

    def load(self, path: Path) -> None:
        """Continue the conversation in a file that `save` wrote.

        Raises:
            UsageError: it is no such file; the conversation stays as it was.
        """
        fix = "Give a file that /save wrote."
        saved = read_json(path, _Saved, expected="a saved conversation", fix=fix, error=UsageError)
        if saved.messages:
            check_messages(saved.messages)
        self.messages = [*saved.messages]
        self._tokens, self._text = [], ""

    def _answered(self, content: str, tokens: Sequence[int], text: str) -> None:
        """Add an answer; the cache holds the tokens of this text, which begins the conversation."""
        self.messages = [*self.messages, {"role": "assistant", "content": content}]
        self._tokens, self._text = list(tokens), text


class Answer(Iterator[Token]):
    """The model's turn: a stream of tokens.

    Attributes:
        text: the answer so far.
    """

    def __init__(self, conversation: Conversation, before: list[Message], prompt: str, generation: Generation) -> None:
        self.text = ""
        self._conversation = conversation
        self._before = before
        self._prompt = prompt
        self._generation = generation
        self._generated: list[int] = []
        self._whole = 0, 0  # tokens and characters up to which both say the same
        self._is_kept = False

    def __next__(self) -> Token:
        """The next token; at the end the answer is added to the conversation.

        Raises:
            StopIteration: the answer has ended.
        """
        try:
            token = next(self._generation)
        except BaseException:
            self.close()
            raise
        self._generated.append(token.id)
        self.text += token.text
        if self._generation.is_whole_text:
            self._whole = len(self._generated), len(self.text)
        return token

    def close(self) -> None:
        """End the answer here and add it to the conversation. Closing twice is harmless."""
        self._generation.close()
        if self._is_kept:
            return
        self._is_kept = True
        if not self._generated:
            self._conversation.messages = self._before
            return
        # Later tokens end the text, or are of a stop text or half a character: the cache has them, the text does not.
        count, length = self._whole
        tokens = [*self._generation.prompt, *self._generated[:count]]
        self._conversation._answered(self.text, tokens, self._prompt + self.text[:length])

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stats(self) -> GenerationStats:
        """Statistics so far."""
        return self._generation.stats
