"""Conversations: messages, their pictures, tools and the form of an answer, and `POST /v1/chat/completions`."""

from __future__ import annotations

import binascii
import re
import time
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal
from urllib.parse import unquote
from uuid import uuid4

import msgspec
from msgspec import UNSET, UnsetType

from edgekv.engine.pictures import PictureOpening, Pictures, PictureSent
from edgekv.errors import UsageError
from edgekv.pictures import Picture, TileGrid, picture_content
from edgekv.runtime.load_options import OnFull
from edgekv.serve.engine_thread import Finished, FinishReason, Piece, PromptLogprobs, Wanted
from edgekv.serve.errors import ApiError, refused
from edgekv.serve.fields import Unsupported
from edgekv.serve.generation import (
    ResponseFormat,
    SamplingFields,
    Usage,
    accept,
    answer,
    check_top_logprobs,
    check_wanted_tokens,
    for_answers,
    wanted_of,
)
from edgekv.serve.http import DONE, DROPPED_HEADER, Exchange, event
from edgekv.serve.logprobs import Likelihood, TokenNames
from edgekv.serve.service import Service
from edgekv.serve.work import Job
from edgekv.spec.chat import IMAGE_PART, ChatTemplates, Message, check_messages, pictures_in
from edgekv.text import SamplingParams, Tools
from edgekv.text.grammar import Grammar
from edgekv.text.sampler import check_ids
from edgekv.text.tools import render_with_tools

_TEXT_PARTS = ("text", "input_text", "output_text")
_TAKEN = {"messages", "tools", "add_generation_prompt", "name"}
URL_PART = "image_url"
MOST_PICTURES = 32
"""Of a request: more than any context has room for."""
MOST_PIXELS = 1 << 26
"""Of all pictures of a prompt: five photos of 12 million pixels. Decoding them takes seconds."""
MOST_MESSAGES = 10_000
"""Of a conversation, with the turns that a full context drops."""
_DATA = re.compile(r"data:image/[a-z0-9.+-]+(;[^;,]{0,80}){0,4};base64,", re.IGNORECASE | re.ASCII)
_PICTURE = "a data URI: data:image/png;base64,..."
_DETAILS = (None, "auto", "low", "high")


class MessagePictures:
    """Finds the pictures of a request's messages, which number them in order. None of them is opened.

    Attributes:
        sent: so far.
    """

    def __init__(self, pictures: Pictures) -> None:
        self._pictures = pictures
        self.sent: list[PictureSent] = []

    def number(self, part: Mapping[str, Any], field: str) -> int:
        """The number of the picture of a part.

        Its content says what kind of picture it is, whatever the URI says.

        Raises:
            ApiError: no data URI of a picture, an unknown detail, or too many pictures.
            UsageError: the bundle reads text alone, or the file is too large.
        """
        try:
            _ = self._pictures.spec
        except UsageError as error:
            raise UsageError(field, got=error.got, expected=error.expected, fix=error.fix) from None
        given = part.get(URL_PART)
        inner, within = (given, f"{field}.{URL_PART}") if isinstance(given, dict) else (part, field)
        url = inner.get("url") if isinstance(given, dict) else given
        at = f"{within}.url" if isinstance(given, dict) else f"{field}.{URL_PART}"
        if (detail := inner.get("detail")) not in _DETAILS:
            fix = "Ask for low to have a large picture in one tile."
            raise refused(f"{within}.detail", got=repr(detail)[:40], expected="auto, low or high", fix=fix)
        if not isinstance(url, str) or (start := _DATA.match(url)) is None:
            found = url[:40] if isinstance(url, str) else type(url).__name__
            fix = "Send the picture itself: the server fetches nothing."
            raise refused(at, got=repr(found), expected=_PICTURE, fix=fix)
        if len(self.sent) == MOST_PICTURES:
            raise refused(at, got="one more", expected=f"at most {MOST_PICTURES} pictures", fix="Send fewer.")
        try:
            encoded = "".join(unquote(url[start.end() :]).split())  # as browsers read such a URI
            content = b64decode(encoded, validate=True)
        except (binascii.Error, ValueError) as error:
            raise refused(at, got=error, expected="whole base64", fix="Encode the picture again.") from None
        self.sent.append(PictureSent(picture_content(content, at), at, detail != "low"))
        return len(self.sent) - 1


def check_count(field: str, count: int) -> None:
    """Refuse more messages than a conversation can have.

    Raises:
        ApiError: naming the field.
    """
    if count > MOST_MESSAGES:
        found, wanted = f"{count:,} messages", f"at most {MOST_MESSAGES:,}"
        raise refused(field, got=found, expected=wanted, fix="Leave the oldest ones out.")


def template_messages(
    messages: Sequence[Mapping[str, Any]], pictures: MessagePictures, *, has_developer: bool
) -> list[Message]:
    """Messages with content as text, or parts if there are pictures.

    Args:
        messages: as the API has them.
        pictures: finds those of the messages.
        has_developer: whether the template knows the role developer; otherwise it becomes system.

    Raises:
        ApiError: content that is neither text nor a picture, or too many messages.
        UsageError: a picture for a bundle that reads text alone.
    """
    check_count("messages", len(messages))
    return [_message(message, f"messages[{at}]", pictures, has_developer) for at, message in enumerate(messages)]


def _content(content: object, field: str, pictures: MessagePictures) -> object:
    """A content with its pictures by number; without any, as `text_of` gives it."""
    if not isinstance(content, list) or not any(isinstance(p, dict) and p.get("type") == URL_PART for p in content):
        return text_of(content, field)
    found = list[dict[str, Any]]()
    for at, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == URL_PART:
            found.append({"type": IMAGE_PART, "picture": pictures.number(part, f"{field}[{at}]")})
        else:
            found.append({"type": "text", "text": text_of([part], f"{field}[{at}]")})
    return found


def text_of(content: object, field: str) -> object:
    """The text of a content: itself, or its parts joined. Whatever else it is, the template's check refuses.

    Args:
        content: of a message.
        field: its name in errors.

    Raises:
        ApiError: a part that is no text, such as an image.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) and kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            fix = "Give text; a model that reads pictures takes them as image_url, or as input_image in /v1/responses."
            raise refused(f"{field}[{at}]", got=repr(kind)[:40], expected="a text part", fix=fix)
        texts.append(text)
    return "".join(texts)


def _message(message: Mapping[str, Any], field: str, pictures: MessagePictures, has_developer: bool) -> Message:
    found = {name: value for name, value in message.items() if value is not None}
    found["content"] = _content(message.get("content"), f"{field}.content", pictures)
    if found.get("role") == "developer" and not has_developer:
        found["role"] = "system"
    return found


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of an answer.

    Attributes:
        grammar: what the text has to be; None for free text.
        tools: functions that it may call; None if there are none.
    """

    grammar: Grammar | None = None
    tools: Tools | None = None


def read_form(
    constraint: tuple[str, Callable[[], Grammar]] | None,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: object,
    parallel: bool | None,
) -> AnswerForm:
    """The form that a request asks for.

    Args:
        constraint: as `SamplingFields.constraint` gives it.
        tools: as chat completions declare them.
        choice: `tool_choice`.
        parallel: `parallel_tool_calls`.

    Raises:
        ApiError: an unknown choice, or a constraint together with tools.
        UsageError: a schema or a tool that is wrong or too large.
    """
    grammar = None if constraint is None else constraint[1]()
    if not tools:
        if choice not in (None, "none", "auto"):
            raise refused("tool_choice", got="a choice without tools", expected="tools with it", fix="Add tools.")
        return AnswerForm(grammar)
    found = Tools.read(tools, _choice(choice), parallel=parallel is not False)
    if constraint is not None and found.callable:
        fix = "Leave the tools out, or set tool_choice to none."
        raise refused(constraint[0], got="a constraint together with tools", expected="one of them", fix=fix)
    return AnswerForm(grammar, found)


def _choice(choice: object) -> str:
    """A `tool_choice` as `Tools.read` takes it: a word, or the name of a function."""
    if choice is None:
        return "auto"
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function", choice)
        choice = function.get("name") if isinstance(function, dict) else None
    if not isinstance(choice, str):
        fix = 'Use {"type": "function", "function": {"name": ...}}.'
        raise refused("tool_choice", got="another object", expected="auto, none, required or a function", fix=fix)
    return choice


PromptEnd = Literal["new turn", "turn", "last message"]
"""Where a prompt ends: where the model's turn begins, at the end of the last turn, or within it."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """A conversation's next turn, on its way from a request to the engine.

    Attributes:
        fields: how to sample.
        messages: as templates take them, with pictures by number.
        sent: these pictures.
        form: what the answer has to be.
        variables: further variables of the template.
        wanted_tokens: the most tokens to generate; None for as many as the context has room for.
        on_full: whether the oldest turns are dropped.
        ends: where the prompt ends.
        n: answers.
        top_logprobs: how many of the most likely tokens to report; None for no log-probabilities.
        lora: adapters, as `Model.generate` takes them.
    """

    fields: SamplingFields
    messages: list[Message]
    sent: list[PictureSent]
    form: AnswerForm
    variables: dict[str, Any]
    wanted_tokens: int | None
    on_full: OnFull
    ends: PromptEnd = "new turn"
    n: int = 1
    top_logprobs: int | None = None
    lora: str | None = None

    @classmethod
    def read(
        cls,
        service: Service,
        fields: SamplingFields,
        messages: Sequence[Mapping[str, Any]],
        form: AnswerForm,
        variables: Mapping[str, Any] | None = None,
        effort: tuple[str, str | None] = ("reasoning_effort", None),
        **more: Any,
    ) -> Turn:
        """The turn of a request.

        Args:
            service: its templates are used.
            fields: how to sample.
            messages: as the API has them.
            form: what the answer has to be.
            variables: further variables of the template.
            effort: how much the model is to think, a variable of some templates, and its field in the request.
            more: the other attributes.

        Raises:
            ApiError: content that is neither text nor a picture, or a variable that the messages set.
            UsageError: the bundle has no template, or a message is malformed.
        """
        templates = service.texts.chat_templates
        has_developer = any("developer" in source for source in templates.templates.values())
        pictures = MessagePictures(service.pictures)
        told = template_messages(messages, pictures, has_developer=has_developer)
        given = dict(variables or {})
        if taken := given.keys() & _TAKEN:
            raise refused("chat_template_kwargs", got=min(taken), expected="other variables", fix="Leave it out.")
        if effort[1] is not None:
            if not any("reasoning_effort" in source for source in templates.templates.values()):
                found, wanted = repr(effort[1])[:40], "nothing: the chat template does not know it"
                fix = "Leave it out, or set a variable that it knows in chat_template_kwargs, such as enable_thinking."
                raise refused(effort[0], got=found, expected=wanted, fix=fix)
            given["reasoning_effort"] = effort[1]
        check_messages(told)
        turn = cls(fields=fields, messages=told, sent=pictures.sent, form=form, variables=given, **more)
        turn._check()
        return turn

    def _check(self) -> None:
        """Refuse what does not go together.

        Raises:
            ApiError: naming the field.
        """
        has_calls = self.form.tools is not None and bool(self.form.tools.callable)
        if self.fields.min_tokens and has_calls:
            found = f"{self.fields.min_tokens} with tools that may be called"
            raise refused("min_tokens", got=found, expected="one of them", fix="Leave one of them out.")
        if self.ends != "last message":
            return
        field, last = "continue_final_message", self.messages[-1]
        if has_calls:
            fix = "Leave the tools out, or set tool_choice to none."
            raise refused(field, got="true with tools that may be called", expected="one of them", fix=fix)
        if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
            found, wanted = f"a last message of {last.get('role')!r}", "one of the assistant, with text"
            raise refused(field, got=found, expected=wanted, fix="Add it, or leave this out.")

    def rendered(self, templates: ChatTemplates, kept: Sequence[Message]) -> str:
        """The text of messages.

        Raises:
            ApiError: the template does not write the message that is to be continued as it is.
            UsageError: the template refuses the messages.
        """
        tools, variables = self.form.tools, self.variables
        if self.ends == "new turn":
            return render_with_tools(templates, kept, tools, **variables)
        variables = {**variables, "add_generation_prompt": False}
        if self.ends == "turn":
            return render_with_tools(templates, kept, tools, **variables)
        mark = uuid4().hex
        last = {**kept[-1], "content": kept[-1]["content"] + mark}
        before, *after = render_with_tools(templates, [*kept[:-1], last], tools, **variables).split(mark)
        if len(after) != 1 or not before.endswith(kept[-1]["content"]):
            found, wanted = "a chat template that writes the last message otherwise", "one that writes it as it is"
            raise refused("continue_final_message", got=found, expected=wanted, fix="Leave it out.")
        return before


class TurnWork:
    """The work on a turn before the engine has it: JSON, messages and tokens; new pictures; a new grammar.

    Each is done in a lane of its own, so that texts wait neither for pictures nor for grammars.
    """

    def __init__(self, service: Service, exchange: Exchange, read: Callable[[], Turn]) -> None:
        """Do nothing yet.

        Args:
            service: its tokenizer and templates are used.
            exchange: the request; its answer has a header that counts the messages that were dropped.
            read: the turn of the request's body.
        """
        self._service = service
        self._exchange = exchange
        self._read = read
        self._turn: Turn
        self._params: SamplingParams
        self._prompt: tuple[int, ...] = ()
        self._shown: tuple[Picture, ...] = ()

    async def wanted(self) -> list[Wanted]:
        """What each answer asks of the engine.

        Raises:
            ApiError: as `Exchange.work`.
            ContextFullError: the conversation is longer than the context, and no turn may be dropped.
            UsageError: the template refuses the messages, a picture cannot be read, a value is out of range, or a
                grammar is wrong or too complex.
        """
        lanes, work = self._service.lanes, self._exchange.work
        wanted = await work(lanes.texts, self._begin)
        if wanted is None and not self._prompt:
            wanted = await work(lanes.pictures, self._fit_new)
        return wanted if wanted is not None else await work(lanes.grammars, self._bind)

    def _begin(self, job: Job) -> list[Wanted] | None:
        turn, service = self._read(), self._service
        self._turn = turn
        params = turn.fields.params(service.model.defaults, turn.wanted_tokens or service.context)
        check_ids(params, service.model.bundle.manifest.model.vocab)
        self._params = replace(params, grammar=turn.form.grammar)
        if not turn.sent:
            self._fit(job, None)
            return self._finished()
        with service.pictures.opening(turn.sent, self._exchange.cache_salt) as opening:
            if None in opening.opened:
                return None
            self._fit(job, opening)
        return self._finished()

    def _fit_new(self, job: Job) -> list[Wanted] | None:
        """The prompt of a turn with pictures that are to be decoded."""
        opening = self._service.pictures.opening(self._turn.sent, self._exchange.cache_salt)
        with opening as opened, job.stopped_by(opened.stop):
            self._fit(job, opened)
        return self._finished()

    def _bind(self, job: Job) -> list[Wanted]:
        form = self._turn.form
        self._service.texts.bind(form.grammar, form.tools, self._exchange.cache_salt)
        return self._made()

    def _fit(self, job: Job, opening: PictureOpening | None) -> None:
        """Count the tokens by the headers of pictures, then decode those that the prompt shows."""
        turn, service = self._turn, self._service
        templates = service.texts.chat_templates
        sizes = [] if opening is None else [opening.size(number) for number in range(len(turn.sent))]

        def render(kept: Sequence[Message]) -> str:
            job.check()
            shown = [sizes[number] for number in pictures_in(kept)]
            return service.pictures.rendered(kept, shown, lambda told: turn.rendered(templates, told))

        while True:
            try:
                fitted = service.texts.fit(
                    turn.messages, render, on_full=turn.on_full, wanted_tokens=turn.wanted_tokens
                )
            except UsageError as error:
                if not error.field.startswith("chat template"):
                    raise
                raise UsageError("messages", got=error.got, expected=error.expected, fix=error.fix) from None
            shown = pictures_in(fitted.messages)
            self._check_pixels([(number, sizes[number].grid) for number in shown])
            before = {number: sizes[number].grid for number in shown}
            if opening is not None:
                for number in shown:
                    job.check()
                    sizes[number] = opening.open(number)
            if all(sizes[number].grid == grid for number, grid in before.items()):
                break  # otherwise a PNG said behind its pixels that it is turned
        if fitted.dropped_messages:
            self._exchange.headers.append((DROPPED_HEADER, str(fitted.dropped_messages).encode()))
        self._shown = tuple(size for number in shown if isinstance(size := sizes[number], Picture))
        self._prompt = service.pictures.put(fitted.tokens, self._shown)

    def _check_pixels(self, shown: Sequence[tuple[int, TileGrid]]) -> None:
        total = 0
        for number, grid in shown:
            total += grid.size[0] * grid.size[1]
            if total > MOST_PIXELS:
                found, wanted = f"pictures of {total:,} pixels up to this one", f"at most {MOST_PIXELS:,} in a prompt"
                raise refused(self._turn.sent[number].field, got=found, expected=wanted, fix="Resize them first.")

    def _finished(self) -> list[Wanted] | None:
        """None if the grammar is still to be compiled."""
        form = self._turn.form
        is_bound = self._service.texts.is_bound(form.grammar, form.tools, self._exchange.cache_salt)
        return self._made() if is_bound else None

    def _made(self) -> list[Wanted]:
        turn, params, service = self._turn, self._params, self._service
        if turn.wanted_tokens is None:
            params = replace(params, max_new_tokens=service.context - len(self._prompt) + 1)
        wanted = wanted_of(
            service,
            self._exchange,
            self._prompt,
            params,
            turn.top_logprobs,
            tools=turn.form.tools,
            lora=turn.lora,
            is_answer=True,
            pictures=self._shown,
        )
        return for_answers([wanted], turn.n)


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """The body of a request."""

    path: ClassVar[str] = "/v1/chat/completions"
    names: ClassVar[dict[str, str]] = {
        **SamplingFields.names,
        "prompt": "messages",
        "max_new_tokens": "max_completion_tokens",
    }
    unsupported: ClassVar[dict[str, Unsupported]] = {
        "add_special_tokens": Unsupported("The chat template writes them; leave it out.", (False,)),
        "echo": Unsupported("Leave it out; the client has the messages.", (False,)),
        "max_output_tokens": Unsupported("Use max_completion_tokens."),
        "text": Unsupported("Use response_format."),
    }

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        super().check()
        for name in ("audio", "functions", "function_call", "web_search_options"):
            if getattr(self, name) is not None:
                raise refused(name, got="a value", expected="nothing", fix="It is not supported; leave it out.")
        if self.modalities not in (None, ["text"]):
            raise refused("modalities", got=self.modalities, expected="text", fix="Leave it out.")
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", got="no logprobs", expected="logprobs true with it", fix="Set logprobs.")
        if self.continue_final_message and self.add_generation_prompt:
            fix = "Set add_generation_prompt to false, or leave it out."
            raise refused("continue_final_message", got="true with a new turn", expected="one of them", fix=fix)
        if self.messages and self.messages[-1].get("prefix"):
            field, fix = f"messages[{len(self.messages) - 1}].prefix", "Use continue_final_message."
            raise refused(field, got="a value", expected="nothing", fix=fix)

    def asked_format(self) -> tuple[str, ResponseFormat] | None:
        return None if self.response_format is None else ("response_format", self.response_format)

    @property
    def ends(self) -> PromptEnd:
        """Where the prompt ends."""
        if self.continue_final_message:
            return "last message"
        return "turn" if self.add_generation_prompt is False else "new turn"

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens to generate; None if the request does not say.

        Raises:
            ApiError: out of range.
        """
        if self.max_completion_tokens is not None:
            return check_wanted_tokens("max_completion_tokens", self.max_completion_tokens)
        return check_wanted_tokens("max_tokens", self.max_tokens)


class TopLogprob(msgspec.Struct, frozen=True):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]

    @classmethod
    def of(cls, found: Likelihood, names: TokenNames) -> TopLogprob:
        return cls(names.text(found.id), found.logprob, list(names.data(found.id)))


class ContentLogprob(TopLogprob, frozen=True):
    """A token of the answer, with the most likely ones."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a choice."""

    content: list[ContentLogprob]
    refusal: None = None


class FunctionRecord(msgspec.Struct, frozen=True):
    """A function and the arguments of a call, as a text of JSON."""

    name: str
    arguments: str


class CallRecord(msgspec.Struct, frozen=True):
    """A call of a tool; `index` is its number, in streams only."""

    id: str
    function: FunctionRecord
    index: int | UnsetType = UNSET
    type: str = "function"


class AnswerMessage(msgspec.Struct, frozen=True):
    """The model's message; `reasoning_content` are its thoughts."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallRecord] | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True):
    """An answer."""

    message: AnswerMessage
    finish_reason: FinishReason
    logprobs: ChoiceLogprobs | None = None
    index: int = 0


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer to a request."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: str = "chat.completion"


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallRecord] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """A part of an answer."""

    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChoiceLogprobs | None = None
    index: int = 0


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"


async def chat_completions(service: Service, exchange: Exchange) -> None:
    """Answer a conversation.

    Raises:
        ApiError, EdgeKVError: the request is refused.
        DisconnectedError: the client has gone.
    """
    body, replies = await exchange.body(), list[_Reply]()

    def read() -> Turn:
        request, lora = accept(service, exchange, body, ChatRequest)
        n = request.choices(1, service.limits)
        replies.append(_Reply(service, request, n))
        return Turn.read(
            service,
            request,
            request.messages,
            read_form(request.constraint(), request.tools, request.tool_choice, request.parallel_tool_calls),
            request.chat_template_kwargs,
            effort=("reasoning_effort", request.reasoning_effort),
            ends=request.ends,
            wanted_tokens=request.wanted_tokens,
            on_full=service.on_full,
            n=n,
            top_logprobs=check_top_logprobs("top_logprobs", request.top_logprobs or 0) if request.logprobs else None,
            lora=lora,
        )

    wanted = await TurnWork(service, exchange, read).wanted()
    (reply,) = replies
    await answer(service, exchange, wanted, reply, n=len(wanted), streams=reply.streams)


@dataclass(slots=True)
class _Answer:
    """One of the answers so far.

    Attributes:
        has_begun: whether a stream has named the role.
        text: so far, as all that follows; in streams only the calls are kept.
        thoughts: of the model.
        calls: of tools.
        logprobs: of the tokens.
    """

    has_begun: bool = False
    text: str = ""
    thoughts: str = ""
    calls: list[CallRecord] = field(default_factory=list)
    logprobs: list[ContentLogprob] = field(default_factory=list)

    def reason(self, end: Finished) -> FinishReason:
        """Why it ended."""
        return "tool_calls" if self.calls and end.reason == "stop" else end.reason


class _Reply:
    """See `edgekv.serve.generation.Reply`.

    Attributes:
        streams: whether it is a stream.
    """

    def __init__(self, service: Service, request: ChatRequest, n: int) -> None:
        self._names = service.names
        self._model = request.model or service.name
        self._request = request
        self.streams = bool(request.stream)
        self._id = f"chatcmpl-{uuid4().hex}"
        self._created = int(time.time())
        self._answers = [_Answer() for _ in range(n)]

    def head(self) -> bytes:
        return b""

    def add(self, index: int, happened: Piece | PromptLogprobs | Finished) -> bytes:
        so_far, streams = self._answers[index], self.streams
        data = b""
        if streams and not so_far.has_begun:  # with the first token: a write of its own costs as much as a token's
            so_far.has_begun = True
            data = self._chunk(ChunkChoice(Delta("assistant", ""), index=index))
        if isinstance(happened, Finished):
            return data + self._chunk(ChunkChoice(Delta(), so_far.reason(happened), index=index)) if streams else b""
        if isinstance(happened, PromptLogprobs):
            return data
        logprobs, calls = self._logprobs(happened), self._calls(happened, len(so_far.calls))
        so_far.calls += calls
        if not streams:
            so_far.text += happened.text
            so_far.thoughts += happened.thoughts or ""
            so_far.logprobs += logprobs
            return b""
        if happened.thoughts:
            data += self._chunk(ChunkChoice(Delta(reasoning_content=happened.thoughts), index=index))
        if happened.text or logprobs:
            found = ChoiceLogprobs(logprobs) if logprobs else None
            data += self._chunk(ChunkChoice(Delta(content=happened.text), logprobs=found, index=index))
        if calls:
            data += self._chunk(ChunkChoice(Delta(tool_calls=calls), index=index))
        return data

    def tail(self, ends: Sequence[Finished]) -> bytes:
        usage = event(self._made([], self._usage(ends))) if self._request.includes_usage else b""
        return usage + DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.body)

    def whole(self, ends: Sequence[Finished]) -> ChatCompletion:
        choices = [
            Choice(
                AnswerMessage(
                    answer.text or (None if answer.calls else ""),
                    reasoning_content=answer.thoughts or UNSET,
                    tool_calls=answer.calls or UNSET,
                ),
                answer.reason(end),
                ChoiceLogprobs(answer.logprobs) if self._request.logprobs else None,
                index,
            )
            for index, (answer, end) in enumerate(zip(self._answers, ends, strict=True))
        ]
        usage = self._usage(ends)
        return ChatCompletion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _usage(self, ends: Sequence[Finished]) -> Usage:
        return Usage.of(ends, len(self._answers))

    def _chunk(self, choice: ChunkChoice) -> bytes:
        return event(self._made([choice], None if self._request.includes_usage else UNSET))

    def _made(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> Chunk:
        return Chunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _calls(self, piece: Piece, first: int) -> list[CallRecord]:
        """The calls that a token completes; their numbers begin with `first`."""
        return [
            CallRecord(
                f"call_{uuid4().hex[:24]}",
                FunctionRecord(call.name, call.arguments),
                number if self._request.stream else UNSET,
            )
            for number, call in enumerate(piece.calls, first)
        ]

    def _logprobs(self, piece: Piece) -> list[ContentLogprob]:
        if piece.logprob is None:
            return []
        found = piece.logprob
        own = TopLogprob.of(found.token, self._names)
        top = [TopLogprob.of(each, self._names) for each in found.top]
        return [ContentLogprob(own.token, own.logprob, own.bytes, top)]
