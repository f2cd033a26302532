"""A conversation on a model: its messages, and the tokens that its cache holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from edgekv.draft import Speculation
from edgekv.engine import Generation, GenerationStats
from edgekv.errors import UsageError
from edgekv.machine.json_file import read_json, readable_json
from edgekv.machine.scratch import atomic_file
from edgekv.model import Model
from edgekv.pictures import Picture
from edgekv.runtime.load_options import OnFull, check_on_full
from edgekv.spec.chat import IMAGE_PART, Message, check_messages, pictures_in
from edgekv.text import Prompt, SamplingParams, Token, split_turns
from edgekv.text.tools import render_with_tools


class _ConversationFile(msgspec.Struct, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]


def answer_defaults(model: Model) -> SamplingParams:
    """The defaults for an answer, which may fill the context unless the bundle says otherwise."""
    manifest = model.bundle.manifest
    if manifest.generation is not None and manifest.generation.max_new_tokens is not None:
        return model.chat_defaults
    return replace(model.chat_defaults, max_new_tokens=manifest.context)


class Conversation:
    """Turns of a user and a model. Each turn prefills only its new tokens; a cache of its own has the others.

    An answer that is still being read when the conversation changes ends there.

    Attributes:
        messages: all turns so far, as chat templates take them, with those that the model no longer sees.
        params: how to sample and when to stop.
        on_full: what happens when the messages are longer than the context; see `Texts.fit`.
    """

    def __init__(
        self,
        model: Model,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        on_full: OnFull = "drop-oldest",
        speculate: Speculation | None = None,
        lora: str | None = None,
    ) -> None:
        """Start a conversation.

        Args:
            model: a bundle with a chat template.
            system: the system prompt; None for the template's own.
            params: how to sample and when to stop; None for the model's defaults, and answers up to the context's end.
            on_full: `drop-oldest` or `stop`.
            speculate: how to draft tokens; None for no drafts.
            lora: adapters of the bundle, as `Model.generate` takes them; None for the base model.

        Raises:
            UsageError: the bundle has no chat template, or no such adapters; or another `on_full`.
        """
        self.on_full = check_on_full(on_full)
        self.messages: list[Message] = []
        self._model = model
        self._sequence = model.own_sequence(self)
        self.params = answer_defaults(model) if params is None else params
        self._speculate = speculate
        self._lora = lora
        self._known = _KnownText()
        self._pictures: list[Picture] = []
        self._unfinished: Answer | None = None
        _ = model.chat_templates, model.open_lora(lora)  # refused now, not at the first turn
        self.system = system

    @property
    def system(self) -> str | None:
        """The system prompt; None for the template's own. A new one holds from the next answer on."""
        leading, _ = split_turns(self.messages)
        return None if not leading else "\n".join(text_of(message) for message in leading)

    @system.setter
    def system(self, text: str | None) -> None:
        self._finish()
        leading, _ = split_turns(self.messages)
        instructions: list[Message] = [] if text is None else [{"role": "system", "content": text}]
        self.messages = [*instructions, *self.messages[len(leading) :]]

    @property
    def context_tokens(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return int(self._model.bundle.manifest.context)

    @property
    def turns(self) -> int:
        """Number of turns."""
        return len(split_turns(self.messages)[1])

    def reset(self) -> None:
        """Forget all turns but the system prompt."""
        self._finish()
        self.messages, _ = split_turns(self.messages)
        self._pictures = []

    def undo(self) -> list[Message]:
        """Take the last turn back: the user's message and what follows it.

        Returns:
            Its messages.

        Raises:
            UsageError: there is none.
        """
        self._finish()
        taken = self._last_turn()
        self.messages = self.messages[: -len(taken)]
        return taken

    def say(self, content: str, pictures: Sequence[Picture] = ()) -> Answer:
        """Add the user's turn. The answer is generated as it is read; an interrupted answer keeps its text so far.

        A turn whose answer is interrupted or fails before its first token is taken back.

        Args:
            pictures: in front of it, as `Model.open_picture` opens them.

        Raises:
            UsageError: the template refuses the conversation.
            ContextFullError: the conversation is longer than the context and `on_full` is `stop`, or this message alone
                is; it is not added.
        """
        self._finish()
        said: str | list[dict[str, Any]] = content
        if pictures:
            numbers = range(len(self._pictures), len(self._pictures) + len(pictures))
            self._pictures += pictures
            said = [*({"type": IMAGE_PART, "picture": number} for number in numbers), {"type": "text", "text": content}]
        return self._answer([*self.messages, {"role": "user", "content": said}])

    def regenerate(self) -> Answer:
        """Answer the last message of the user again. An answer that fails before its first token leaves the old one.

        Raises:
            UsageError: there is no message of the user, or the template refuses the conversation.
            ContextFullError: as `say`.
        """
        self._finish()
        taken = self._last_turn()
        if taken[0].get("role") != "user":
            expected = "a message of the user"
            raise UsageError("conversation", got="only an answer", expected=expected, fix="Say something first.")
        return self._answer(self.messages[: len(self.messages) - len(taken) + 1])

    def save(self, path: Path) -> None:
        """Write the messages to a JSON file, atomically.

        Raises:
            UsageError: the file cannot be written, or a turn has pictures.
        """
        if pictures_in(self.messages):
            fix = "Start a new conversation without them."
            raise UsageError("conversation", got="turns with pictures", expected="text, which a file holds", fix=fix)
        try:
            with atomic_file(path) as partial:
                partial.write_bytes(
                    readable_json(_ConversationFile(messages=[dict(message) for message in self.messages]))
                )
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            got = error.strerror if isinstance(error, OSError) else error
            fix = "Choose another place."
            raise UsageError(str(path), got=got, expected="a file that can be written", fix=fix) from None

    def load(self, path: Path) -> None:
        """Continue the conversation in a file that `save` wrote.

        Raises:
            UsageError: it is no such file; the conversation stays as it was.
        """
        fix = "Give a file that a conversation was saved in."
        try:
            saved = read_json(path, _ConversationFile, expected="a saved conversation", fix=fix, error=UsageError)
        except ValueError as error:  # a NUL in the path
            raise UsageError(repr(str(path)), got=error, expected="a saved conversation", fix=fix) from None
        if saved.messages:
            try:
                check_messages(saved.messages)
            except UsageError as error:
                field = f"{path}: {error.field}"
                raise UsageError(field, got=error.got, expected=error.expected, fix=error.fix) from None
        if pictures_in(saved.messages):
            raise UsageError(f"{path}: messages", got="a picture", expected="text", fix=fix)
        self._finish()
        self.messages = [*saved.messages]
        self._pictures = []
        self._known = _KnownText()

    def pictures_of(self, messages: Sequence[Message]) -> list[Picture]:
        """The pictures of messages of this conversation, or of those that `undo` returned."""
        return [self._pictures[number] for number in pictures_in(messages)]

    def _finish(self) -> None:
        """End the last answer, if it has not ended."""
        if self._unfinished is not None:
            self._unfinished.close()
            self._unfinished = None

    def _last_turn(self) -> list[Message]:
        _, turns = split_turns(self.messages)
        if not turns:
            raise UsageError("conversation", got="no turn", expected="at least one", fix="Say something first.")
        return turns[-1]

    def _answer(self, messages: list[Message]) -> Answer:
        """Generate what follows messages, which become those of the conversation."""
        opened, templates = self._model.pictures, self._model.chat_templates
        prompt = self._model.engine.texts.fit(
            messages,
            lambda kept: opened.rendered(
                kept, self.pictures_of(kept), lambda told: render_with_tools(templates, told, None)
            ),
            on_full=self.on_full,
            max_answer_tokens=self.params.max_new_tokens,
            tokenize=lambda text: self._known.tokens_of(text, self._model),
        )
        generation = self._model.generate(
            prompt.tokens,
            self.params,
            sequence=self._sequence,
            speculate=self._speculate,
            lora=self._lora,
            thoughts=True,
            pictures=self.pictures_of(prompt.messages),
        )
        before, self.messages = self.messages, messages
        self._unfinished = Answer(self, before, prompt, generation)
        return self._unfinished

    def _answered(self, message: Message, prompt: Prompt, text: str, generated: Sequence[int]) -> None:
        """Add an answer. The cache holds its first tokens, which say the beginning `text` of its content."""
        self.messages = [*self.messages, message]
        self._known = self._known.followed_by(prompt, text, generated)


@dataclass(frozen=True, slots=True)
class _End:
    """Where a prompt or an answer ends: characters and tokens up to there."""

    characters: int
    tokens: int
    is_answer: bool


@dataclass(frozen=True, slots=True)
class _KnownText:
    """The last prompt and its answer, with the tokens that the cache holds.

    Tokenizing generated text may give other tokens than those generated, so only what follows it is tokenized.

    Attributes:
        text: the text.
        tokens: its ids.
        ends: of the prompts and answers in it, ascending.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    ends: tuple[_End, ...] = ()

    def tokens_of(self, text: str, model: Model) -> list[int]:
        """The tokens of a text; those up to the end of an answer that it begins with are known.

        Raises:
            EdgeKVError: as `Model.encode_chat`.
        """
        for end in reversed(self.ends):
            if (end.is_answer or end.characters == len(text)) and self._begins(text, end):
                rest = text[end.characters :]
                return [*self.tokens[: end.tokens], *(model.encode_chat(rest) if rest else ())]
        return model.encode_chat(text)

    def followed_by(self, prompt: Prompt, answer: str, generated: Sequence[int]) -> _KnownText:
        """What is known after an answer of these tokens to a prompt whose tokens `tokens_of` gave."""
        text, tokens = prompt.text + answer, (*prompt.tokens, *generated)
        shared = (end for end in self.ends if end.characters < len(prompt.text) and self._begins(text, end))
        ends = [*shared, _End(len(prompt.text), len(prompt.tokens), False)]
        return _KnownText(text, tokens, (*ends, *([_End(len(text), len(tokens), True)] if generated else ())))

    def _begins(self, text: str, end: _End) -> bool:
        return text.startswith(self.text[: end.characters])


class Answer(Iterator[Token]):
    """The model's turn: a stream of tokens.

    Attributes:
        text: the answer so far.
        thoughts: those of the model before it, so far. The chat template says whether later prompts have them.
        dropped_turns: the oldest turns of the conversation, which the model did not see: the context was full.
    """

    def __init__(
        self, conversation: Conversation, before: list[Message], prompt: Prompt, generation: Generation
    ) -> None:
        self.text = self.thoughts = ""
        self.dropped_turns = prompt.dropped_turns
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
        self.thoughts += token.thoughts or ""
        if self._generation.is_whole_text:
            self._whole = len(self._generated), len(self.text)
        return token

    def close(self) -> None:
        """End the answer here and add it to the conversation. Closing twice is harmless."""
        self._generation.close()
        if self._is_kept:
            return
        self._is_kept = True
        self._conversation._unfinished = None  # no circle: the conversation's cache is freed with the last reference
        if not self._generated:
            self._conversation.messages = self._before
            return
        # Later tokens end the text, or are of a stop text or half a character: the cache has them, the text does not.
        count, length = self._whole
        message = {"role": "assistant", "content": self.text}
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        self._conversation._answered(message, self._prompt, self.text[:length], self._generated[:count])

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return self._generation.prompt_tokens

    @property
    def prefilled_tokens(self) -> int:
        """How many of them the cache has by now; another thread may ask while they run."""
        return self._generation.prefilled_tokens

    @property
    def stats(self) -> GenerationStats:
        """Statistics so far."""
        return self._generation.stats


def text_of(message: Message) -> str:
    """The text of a message, for people: its content, or the text parts of it."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
