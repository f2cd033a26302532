"""The text side of a bundle: tokenizer, chat templates, prompts, and what answers have to be."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from operator import index
from typing import TYPE_CHECKING

from edgekv.bundle import Bundle
from edgekv.errors import ContextFullError, EdgeKVError, UsageError
from edgekv.kv import PolicyName
from edgekv.runtime.load_options import OnFull
from edgekv.spec.chat import ChatTemplates, Message, check_messages, read_bundle_templates
from edgekv.spec.text import begins_with, encode, encode_cut
from edgekv.text.constraint import Constraint, GrammarCompiler
from edgekv.text.grammar import Grammar
from edgekv.text.output import decode
from edgekv.text.thoughts import ThoughtFormat, ThoughtReader, thought_format
from edgekv.text.tools import (
    CallFormat,
    ToolCallReader,
    Tools,
    find_format,
    render_with_tools,
    special_tokens,
    tools_grammar,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from edgekv.pictures import Picture

PromptInput = str | Sequence[int]
"""Text, or token ids."""
Renderer = Callable[[Sequence[Message]], str]
"""The text of messages."""

_ALWAYS_READ = 1 << 16
"""Texts of up to this many characters are tokenized without a check against the context."""
_SLACK = 4
"""Unicode normalization can shorten a text, at most to a third of its characters (NFC)."""
_MARK_TOKENS = 16
"""The most tokens of a mark at the end of a prompt."""
_MAX_SLIDING = 1 << 22
"""Maximum characters of a prompt that may exceed the context: the tokenizer needs about 140 bytes per character."""
_PARTS = 4
"""An answer has room for a quarter of the context, and turns are dropped in steps of a quarter."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a conversation.

    Attributes:
        text: as the chat template renders it.
        tokens: its ids, as `Texts.read` gives them; once pictures are in it, with the ids of their rows.
        pictures: in it, in order.
        dropped_turns: the oldest turns of the conversation, which it does not have.
        dropped_messages: the messages of these turns.
        messages: what it has.
    """

    text: str
    tokens: tuple[int, ...]
    pictures: tuple[Picture, ...] = ()
    dropped_turns: int = 0
    dropped_messages: int = 0
    messages: tuple[Message, ...] = ()


class Texts:
    """Turns texts into tokens, and grammars and tools into constraints, for a bundle. Thread-safe."""

    def __init__(self, bundle: Bundle, policy: PolicyName = "fail") -> None:
        self._bundle = bundle
        self._policy = policy
        sink = bundle.manifest.sink
        self._first = [] if sink is None else sink.tokens

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the bundle."""
        return self._bundle.tokenizer()

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a text, with the special tokens that the checkpoint's tokenizer adds.

        Raises:
            UsageError: the text is not Unicode (an argument in another encoding), or the tokenizer fails on it.
        """
        tokens = encode(self.tokenizer, prompt, vocab=self._bundle.manifest.model.vocab)
        bos = self._bundle.manifest.tokens.bos
        return tokens if tokens or bos is None else [bos]

    @cached_property
    def chat_templates(self) -> ChatTemplates:
        """The chat templates of the bundle.

        Raises:
            UsageError: it has none.
        """
        templates = read_bundle_templates(self._bundle.path)
        if templates is None:
            raise UsageError(
                "chat template",
                got=f"none in the bundle {self._bundle.path.name}",
                expected="a bundle of a chat model",
                fix="Export a checkpoint that has one, or continue a text with edgekv generate or /v1/completions.",
            )
        return templates

    def text_or_messages(
        self,
        prompt: PromptInput | None,
        messages: Sequence[Message] | None,
        tools: Tools | None = None,
        *,
        written: Callable[[str], str] = str,
        rendered: Callable[[Sequence[Message], Renderer], str] = lambda messages, render: render(messages),
    ) -> PromptInput:
        """The prompt, or the tokens of messages.

        Args:
            prompt: text or ids.
            messages: instead.
            tools: that messages may call.
            written: changes a prompt of text before it is tokenized.
            rendered: the text of messages, by what renders them.

        Raises:
            UsageError: both or neither are given, or the chat template refuses the messages.
        """
        if (prompt is None) == (messages is None):
            got = "neither" if prompt is None else "both"
            raise UsageError("prompt, messages", got=got, expected="one of them", fix="Give a prompt or messages.")
        if messages is not None:
            check_messages(messages)
            templates = self.chat_templates
            return self.encode_chat(rendered(messages, lambda told: render_with_tools(templates, told, tools)))
        assert prompt is not None
        return written(prompt) if isinstance(prompt, str) else prompt

    def encode_chat(self, text: str) -> list[int]:
        """The tokens of a rendered chat template, which contains its special tokens.

        Raises:
            ContextFullError: the text is too long to fit; it is refused before it is tokenized.
            UsageError: the text is not Unicode, or the tokenizer fails on it.
        """
        self.check_length(text, "messages")
        vocab = self._bundle.manifest.model.vocab
        return encode_cut(self.tokenizer, text, vocab=vocab, field="messages")

    def piece(self, token: int) -> str:
        """The text of one token; a special token's name."""
        return decode(self.tokenizer, [token], skip_special_tokens=False)

    def read(self, prompt: PromptInput, field: str = "prompt") -> list[int]:
        """The tokens of a prompt, checked against the context policy. The sink is put in front unless it is there.

        Raises:
            ContextFullError: more tokens than the context and the policy is `fail`; or a text too long to fit, which is
                refused before it is tokenized.
            UsageError: no tokens, or an id that is not in the vocabulary.
        """
        manifest = self._bundle.manifest
        if isinstance(prompt, str):
            self.check_length(prompt, field)
            tokens = self.encode(prompt)
            if tokens and not begins_with(tokens, self._first):  # the sink has what the tokenizer puts in front
                vocab = self._bundle.manifest.model.vocab
                tokens = [*self._first, *encode(self.tokenizer, prompt, vocab=vocab, add_special_tokens=False)]
        else:
            tokens = self.read_ids(prompt, field)
        if not tokens:
            raise UsageError(field, got="no tokens", expected="at least one", fix="Give some text.")
        if not begins_with(tokens, self._first):
            tokens = [*self._first, *tokens]
        if self._policy == "fail" and len(tokens) > manifest.context:
            raise ContextFullError(
                field,
                got=f"{len(tokens)} tokens",
                expected=f"at most {manifest.context}, the context of the bundle",
                fix="Shorten it, choose the policy sliding-window, or export with a larger --context.",
            )
        return tokens

    def read_ids(self, tokens: Sequence[int], field: str) -> list[int]:
        """Token ids that a caller gives.

        Raises:
            UsageError: one is no whole number, or not in the vocabulary.
        """
        ids, vocab = _ids(tokens, field), self._bundle.manifest.model.vocab
        if wrong := [t for t in ids if not 0 <= t < vocab]:
            got = f"id {wrong[0]}" if wrong[0].bit_length() <= 64 else f"an id of {wrong[0].bit_length()} bits"
            expected = f"0 to {vocab - 1}, the model's vocabulary"
            raise UsageError(field, got=got, expected=expected, fix="Use the bundle's own tokenizer.")
        return ids

    def thoughts(self, prompt: Sequence[int], grammar: Grammar | None, tools: Tools | None) -> ThoughtReader | None:
        """A new reader of the thoughts of an answer; None if it can have none.

        It has none if the bundle's chat template has no marks for them, or the answer is bound from its first token on.
        """
        form = self._thought_format
        if form is None or grammar is not None:
            return None
        if tools is not None and tools.callable and (tools.choice != "auto" or find_format(self.chat_templates).reply):
            return None
        end = decode(self.tokenizer, list(prompt[-_MARK_TOKENS:]), skip_special_tokens=False)
        return ThoughtReader(form, self.special_texts, is_open=form.is_open(end))

    @cached_property
    def _thought_format(self) -> ThoughtFormat | None:
        templates = read_bundle_templates(self._bundle.path)
        return None if templates is None else thought_format(templates)

    @cached_property
    def special_texts(self) -> dict[int, str]:
        """The special tokens by their ids, which have no text in an answer."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {number: token.content for number, token in added.items() if token.special}

    def fit(
        self,
        messages: Sequence[Message],
        render: Callable[[Sequence[Message]], str],
        *,
        on_full: OnFull = "drop-oldest",
        max_answer_tokens: int | None = None,
        tokenize: Callable[[str], list[int]] | None = None,
    ) -> Prompt:
        """The prompt of a conversation.

        Where it leaves less than a quarter of the context for the answer, or less than `max_answer_tokens` if that is
        fewer, the oldest turns are dropped. System messages and the newest turn stay. Turns are dropped in steps of a
        quarter of the context, counted from the first one, so that the next prompts begin alike and find that in the
        cache.

        Args:
            render: the text of messages.
            on_full: whether turns are dropped.
            max_answer_tokens: maximum length of the answer; None for all that fit.
            tokenize: the tokens of a text; None for `encode_chat`.

        Raises:
            ContextFullError: it is longer than the context, with all turns (`stop`) or with the newest alone.
            EdgeKVError: as `render`, or the tokenizer fails.
        """
        system, turns = split_turns(messages)
        last = len(turns) - 1
        context: int = self._bundle.manifest.context
        step = max(1, context // _PARTS)
        answer_tokens = step if max_answer_tokens is None else min(step, max_answer_tokens)

        def prompt(first: int) -> Prompt:
            kept = [*system, *(message for turn in turns[first:] for message in turn)]
            text = render(kept)
            tokens = self.read((tokenize or self.encode_chat)(text), "messages")
            dropped = len(messages) - len(kept)
            return Prompt(text, tuple(tokens), dropped_turns=first, dropped_messages=dropped, messages=tuple(kept))

        @cache
        def fitting(first: int) -> Prompt | None:
            try:
                fitted = prompt(first)
            except ContextFullError:
                return None
            return fitted if len(fitted.tokens) + answer_tokens <= context + 1 else None

        if on_full == "stop" or last < 1 or self._policy != "fail":
            return prompt(0)
        if (whole := fitting(0)) is not None:
            return whole
        # In tokens; those of the template are left out, as only the step that a turn begins in matters.
        offsets = [0, *accumulate(sum(self._about_tokens(message) for message in turn) for turn in turns[:-1])]
        firsts = sorted({bisect_left(offsets, at) for at in range(step, offsets[-1] + 1, step)} | {last})
        at = bisect_left(firsts, True, key=lambda first: fitting(first) is not None)
        return (fitting(firsts[at]) if at < len(firsts) else None) or prompt(last)

    def _about_tokens(self, message: Message) -> int:
        """About how many tokens a message has; of one that is too long to be tokenized, those of the whole context."""
        values = (value if isinstance(value, str) else json.dumps(value, default=str) for value in message.values())
        try:
            return len(self.encode_chat(" ".join(values)))
        except ContextFullError:
            return self._bundle.manifest.context

    def bind(
        self, grammar: Grammar | None, tools: Tools | None, salt: str | None = None
    ) -> tuple[Constraint | None, ToolCallReader | None]:
        """The constraint of an answer and the reader of its calls, each None if there is none.

        Both are new; what is compiled for them is kept for this salt, so that it can be done before a call.

        Raises:
            UsageError: a grammar that is wrong or too complex, a grammar together with tools, or tools and no chat
                template.
            EngineError: llguidance is not installed.
        """
        if tools is None or not tools.callable:
            return self._compiled(grammar, salt), None
        if grammar is not None:
            fix = "Leave one of them out."
            raise UsageError("grammar", got="one together with tools", expected="one of them", fix=fix)
        form, special, reader = self._calls()
        try:
            return self._compiled(tools_grammar(tools, form, special, self._thought_format), salt), reader
        except UsageError as error:
            if error.field.startswith("tools["):
                raise
            self._check_each(tools, salt)
            raise UsageError("tools", got=error.got, expected=error.expected, fix=error.fix) from None

    def is_bound(self, grammar: Grammar | None, tools: Tools | None, salt: str | None = None) -> bool:
        """Whether `bind` takes no time, as nothing is to be compiled; False also for what it refuses."""
        try:
            if tools is not None and tools.callable:
                form, special, _ = self._calls()
                grammar = tools_grammar(tools, form, special, self._thought_format)
            return grammar is None or self._grammars.has(grammar, salt)
        except EdgeKVError:
            return False

    def _calls(self) -> tuple[CallFormat, dict[str, int], ToolCallReader]:
        """The form of calls, the special tokens of answers with calls, and what reads the calls."""
        form, thoughts, is_special = find_format(self.chat_templates), self._thought_format, self._grammars.is_special
        special = special_tokens(self.tokenizer, form.texts, is_special)
        marks = () if thoughts is None else (thoughts.open, thoughts.close)
        reader = ToolCallReader(form, special)
        return form, special | special_tokens(self.tokenizer, marks, is_special), reader

    def _check_each(self, tools: Tools, salt: str | None) -> None:
        """Raise UsageError naming the tool whose schema is wrong by itself."""
        for number, tool in enumerate(tools.tools):
            if tool not in tools.callable:
                continue
            try:
                self._grammars.compile(Grammar.json_schema(tool.parameters), salt)
            except UsageError as error:
                field = f"tools[{number}].function.parameters"
                raise UsageError(field, got=error.got, expected=error.expected, fix=error.fix) from None

    def _compiled(self, grammar: Grammar | None, salt: str | None) -> Constraint | None:
        return None if grammar is None else self._grammars.compile(grammar, salt)

    @property
    def compiling_grammars(self) -> int:
        """Grammars that are compiled now, with those that take too long; for any thread."""
        return self._grammars.compiling if "_grammars" in self.__dict__ else 0

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        """Compiles the grammars of calls."""
        manifest = self._bundle.manifest
        return GrammarCompiler(self.tokenizer, manifest.model.vocab, manifest.tokens.eos)

    @cached_property
    def max_characters(self) -> int:
        """More than a text has whose tokens fill the context."""
        # Byte-level vocabularies write one character per byte, others the text's characters.
        longest = max(len(token) for token in self.tokenizer.get_vocab(with_added_tokens=True))
        return max(_ALWAYS_READ, _SLACK * longest * self._bundle.manifest.context)

    def check_length(self, prompt: str, field: str) -> None:
        """Refuse a text that is too long to fit before it is tokenized.

        Raises:
            ContextFullError: it is.
        """
        if len(prompt) <= _ALWAYS_READ:
            return
        context = self._bundle.manifest.context
        if self._policy == "fail":
            max_characters = self.max_characters
            expected = f"at most {max_characters:,}, more than {context} tokens (the context of the bundle) can hold"
            fix = "Shorten it, or export with a larger --context."
        else:
            max_characters, expected, fix = _MAX_SLIDING, f"at most {_MAX_SLIDING:,}", "Shorten it, or give token ids."
        if len(prompt) > max_characters:
            raise ContextFullError(field, got=f"{len(prompt):,} characters", expected=expected, fix=fix)


def split_turns(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """The system messages at the front, and the turns: each begins with a message of the user, except for the first."""
    first = next(
        (at for at, message in enumerate(messages) if message.get("role") not in ("system", "developer")), None
    )
    if first is None:
        return [*messages], []
    turns = [[messages[first]]]
    for message in messages[first + 1 :]:
        if message.get("role") == "user":
            turns.append([])
        turns[-1].append(message)
    return [*messages[:first]], turns


def _ids(prompt: Sequence[int], field: str) -> list[int]:
    try:
        return [index(token) for token in prompt]
    except TypeError as error:
        raise UsageError(field, got=error, expected="text, or whole numbers", fix="Give token ids.") from None
