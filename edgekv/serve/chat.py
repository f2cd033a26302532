"""Conversations: messages, their pictures, tools and the form of an answer, and `POST /v1/chat/completions`."""

from __future__ import annotations

import binascii
import re
import time
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from urllib.parse import unquote
from uuid import uuid4

import msgspec
from msgspec import UNSET, UnsetType

from edgekv.engine import Request
from edgekv.engine.pictures import PictureOpening, Pictures, PictureSent
from edgekv.errors import UsageError
from edgekv.pictures import Picture, TileGrid, picture_content
from edgekv.runtime.load_options import OnFull
from edgekv.serve.answers import Reply, Usage, answer
from edgekv.serve.engine_thread import FinishReason, PendingAnswer
from edgekv.serve.errors import ApiError, refused
from edgekv.serve.fields import UnsupportedField
from edgekv.serve.generation import (
    ResponseFormat,
    SamplingFields,
    accept,
    check_max_tokens,
    check_top_logprobs,
    compile_grammar,
    for_answers,
)
from edgekv.serve.http import DONE, DROPPED_HEADER, Exchange, event
from edgekv.serve.logprobs import Likelihood, TokenLogprob, TokenNames
from edgekv.serve.service import Service
from edgekv.spec.chat import IMAGE_PART, ChatTemplates, Message, check_messages, pictures_in
from edgekv.text import Prompt, Token, Tools
from edgekv.text.tools import render_with_tools

_TEXT_PARTS = ("text", "input_text", "output_text")
_TAKEN = {"messages", "tools", "add_generation_prompt", "name"}
URL_PART = "image_url"
MAX_PICTURES = 32
"""Of a request: more than any context has room for."""
MAX_PIXELS = 1 << 28
"""Of all pictures of a prompt: one photo of 200 million pixels, or 20 of 12. Decoding them takes seconds."""
MAX_MESSAGES = 10_000
"""Of a conversation, with the turns that a full context drops."""
_KINDS = r"(image/[a-z0-9.+-]+|application/octet-stream)"  # the second one says nothing, as of a file without an ending
_DATA = re.compile(rf"data:{_KINDS}(;[^;,]{{0,80}}){{0,4}};base64,", re.IGNORECASE | re.ASCII)
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
        image = part.get(URL_PART)
        inner, within = (image, f"{field}.{URL_PART}") if isinstance(image, dict) else (part, field)
        url = inner.get("url") if isinstance(image, dict) else image
        at = f"{within}.url" if isinstance(image, dict) else f"{field}.{URL_PART}"
        if (detail := inner.get("detail")) not in _DETAILS:
            fix = "Ask for low to have a large picture in one tile."
            raise refused(f"{within}.detail", got=repr(detail)[:40], expected="auto, low or high", fix=fix)
        url = url.strip() if isinstance(url, str) else url
        if not isinstance(url, str) or (start := _DATA.match(url)) is None:
            got = url[:40] if isinstance(url, str) else type(url).__name__
            fix = "Send the picture itself: the server fetches nothing."
            raise refused(at, got=repr(got), expected=_PICTURE, fix=fix)
        if len(self.sent) == MAX_PICTURES:
            raise refused(at, got="one more", expected=f"at most {MAX_PICTURES} pictures", fix="Send fewer.")
        try:
            encoded = "".join(unquote(url[start.end() :]).split())  # as browsers read such a URI
            content = b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
        except (binascii.Error, ValueError) as error:
            raise refused(at, got=error, expected="whole base64", fix="Encode the picture again.") from None
        self.sent.append(PictureSent(picture_content(content, at), at, detail != "low"))
        return len(self.sent) - 1


def check_count(field: str, count: int) -> None:
    """Refuse more messages than a conversation can have.

    Raises:
        ApiError: naming the field.
    """
    if count > MAX_MESSAGES:
        got, expected = f"{count:,} messages", f"at most {MAX_MESSAGES:,}"
        raise refused(field, got=got, expected=expected, fix="Leave the oldest ones out.")


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
    parts = list[dict[str, Any]]()
    for at, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == URL_PART:
            parts.append({"type": IMAGE_PART, "picture": pictures.number(part, f"{field}[{at}]")})
        else:
            parts.append({"type": "text", "text": text_of([part], f"{field}[{at}]")})
    return parts


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
    fields = {name: value for name, value in message.items() if value is not None}
    fields["content"] = _content(message.get("content"), f"{field}.content", pictures)
    if fields.get("role") == "developer" and not has_developer:
        fields["role"] = "system"
    return fields


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


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """The body of a request."""

    path: ClassVar[str] = "/v1/chat/completions"
    names: ClassVar[dict[str, str]] = {
        **SamplingFields.names,
        "prompt": "messages",
        "max_new_tokens": "max_completion_tokens",
    }
    unsupported: ClassVar[dict[str, UnsupportedField]] = {
        "add_special_tokens": UnsupportedField("The chat template writes them; leave it out.", (False,)),
        "echo": UnsupportedField("Leave it out; the client has the messages.", (False,)),
        "max_output_tokens": UnsupportedField("Use max_completion_tokens."),
        "text": UnsupportedField("Use response_format."),
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
    def max_new_tokens(self) -> int | None:
        """The most tokens to generate; None for as many as the context has room for.

        Raises:
            ApiError: out of range.
        """
        if self.max_completion_tokens is not None:
            return check_max_tokens("max_completion_tokens", self.max_completion_tokens)
        return check_max_tokens("max_tokens", self.max_tokens)

    def declared_tools(self) -> Tools | None:
        """The functions that the answer may call; None if there are none.

        Raises:
            ApiError: an unknown choice, or tools together with what they exclude.
            UsageError: a tool that is wrong or too large.
        """
        if not self.tools:
            if self.tool_choice not in (None, "none", "auto"):
                raise refused("tool_choice", got="a choice without tools", expected="tools with it", fix="Add tools.")
            return None
        tools = Tools.read(self.tools, _choice(self.tool_choice), parallel=self.parallel_tool_calls is not False)
        if not tools.callable:
            return tools
        excluded = (
            {} if (constraint := self.constraint()) is None else {constraint[0]: "a constraint together with tools"}
        )
        if self.min_tokens:
            excluded["min_tokens"] = f"{self.min_tokens} with tools that may be called"
        if self.continue_final_message:
            excluded["continue_final_message"] = "true with tools that may be called"
        for name, got in excluded.items():
            fix = "Leave the tools out, or set tool_choice to none."
            raise refused(name, got=got, expected="one of them", fix=fix)
        return tools

    def conversation(self, service: Service) -> tuple[list[Message], list[PictureSent]]:
        """The messages as templates take them, with their pictures by number, and these pictures; none is opened.

        Raises:
            ApiError: content that is neither text nor a picture, or no message to continue.
            UsageError: the bundle has no template, or a message is malformed.
        """
        templates = service.texts.chat_templates
        has_developer = any("developer" in source for source in templates.templates.values())
        pictures = MessagePictures(service.pictures)
        messages = template_messages(self.messages, pictures, has_developer=has_developer)
        self.template_variables(templates)
        check_messages(messages)
        last = messages[-1]
        if self.continue_final_message and (
            last.get("role") != "assistant" or not isinstance(last.get("content"), str)
        ):
            got, expected = f"a last message of {last.get('role')!r}", "one of the assistant, with text"
            raise refused("continue_final_message", got=got, expected=expected, fix="Add it, or leave this out.")
        return messages, pictures.sent

    def template_variables(self, templates: ChatTemplates) -> dict[str, Any]:
        """Further variables of the chat template.

        Raises:
            ApiError: one that the messages set, or that the template does not know.
        """
        variables = dict(self.chat_template_kwargs or {})
        if taken := variables.keys() & _TAKEN:
            raise refused("chat_template_kwargs", got=min(taken), expected="other variables", fix="Leave it out.")
        if self.reasoning_effort is not None:
            if not any("reasoning_effort" in source for source in templates.templates.values()):
                got, expected = repr(self.reasoning_effort)[:40], "nothing: the chat template does not know it"
                fix = "Leave it out, or set a variable that it knows in chat_template_kwargs, such as enable_thinking."
                raise refused("reasoning_effort", got=got, expected=expected, fix=fix)
            variables["reasoning_effort"] = self.reasoning_effort
        if self.continue_final_message or self.add_generation_prompt is False:
            variables["add_generation_prompt"] = False
        return variables

    def rendered(
        self, templates: ChatTemplates, messages: Sequence[Message], tools: Tools | None, variables: Mapping[str, Any]
    ) -> str:
        """The text of messages.

        Raises:
            ApiError: the template does not write the message that is to be continued as it is.
            UsageError: the template refuses the messages.
        """
        if not self.continue_final_message:
            return render_with_tools(templates, messages, tools, **variables)
        mark, text = uuid4().hex, messages[-1]["content"]
        last = {**messages[-1], "content": text + mark}
        before, *after = render_with_tools(templates, [*messages[:-1], last], tools, **variables).split(mark)
        if len(after) != 1 or not before.endswith(text):
            got, expected = "a chat template that writes the last message otherwise", "one that writes it as it is"
            raise refused("continue_final_message", got=got, expected=expected, fix="Leave it out.")
        return before


class TopLogprob(msgspec.Struct, frozen=True):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]

    @classmethod
    def of(cls, likelihood: Likelihood, names: TokenNames) -> TopLogprob:
        return cls(names.text(likelihood.id), likelihood.logprob, list(names.data(likelihood.id)))


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
    finish_reason: FinishReason | None
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
    body = await exchange.body()

    def read() -> _Asked:
        chat, lora = accept(service, exchange, body, ChatRequest)
        return chat, _Reply(service, chat), lora, service.on_full

    await answer_chat(service, exchange, read)


_Asked = tuple[ChatRequest, Reply, str | None, OnFull]
"""What is asked, how it is answered, with which adapters, and what happens where the context is too short."""


async def answer_chat(service: Service, exchange: Exchange, read: Callable[[], _Asked]) -> None:
    """Answer a conversation.

    Messages become tokens, pictures are decoded and a grammar is compiled off the event loop, each only if it has to be
    and in its own turn, so that texts wait neither for pictures nor for grammars.

    Args:
        service: answers it.
        exchange: the request; its answer has a header that counts the messages that were dropped.
        read: the request of the body.

    Raises:
        ApiError, EdgeKVError: the request is refused.
        DisconnectedError: the client has gone.
    """

    def begin() -> tuple[Reply, bool, list[Request], Callable[[], list[Request]] | None]:
        chat, reply, lora, on_full = read()
        grammar, tools = chat.read_grammar(), chat.declared_tools()
        messages, sent = chat.conversation(service)
        vocab = service.model.bundle.manifest.model.vocab
        params = chat.params(service.model.chat_defaults, vocab, chat.max_new_tokens or service.context, grammar)

        def fitted(opening: PictureOpening | None) -> list[Request]:
            prompt, answer_params = chat_prompt(service, exchange, chat, messages, tools, on_full, opening), params
            if chat.max_new_tokens is None:
                answer_params = replace(params, max_new_tokens=service.context - len(prompt.tokens) + 1)
            request = Request(
                prompt.tokens,
                answer_params,
                salt=exchange.cache_salt,
                tools=tools,
                speculation=service.speculation,
                lora=lora,
                reads_thoughts=True,
                returns_logits=bool(chat.logprobs),
                pictures=prompt.pictures,
            )
            return for_answers(request, reply.n)

        def opened() -> list[Request]:
            opening = service.pictures.opening(sent, exchange.cache_salt)
            with opening as pictures, exchange.stopped_by(lambda _: pictures.stop()):
                return fitted(pictures)

        is_bound = service.texts.is_bound(grammar, tools, exchange.cache_salt)
        if not sent:
            return reply, is_bound, fitted(None), None
        with service.pictures.opening(sent, exchange.cache_salt) as pictures:
            if None in pictures.opened:
                return reply, is_bound, [], opened
            return reply, is_bound, fitted(pictures), None

    reply, is_bound, requests, opened = await service.work.run(exchange, "chat", begin)
    if opened is not None:
        requests = await service.work.run(exchange, "pictures", opened)
    if not is_bound:
        await compile_grammar(service, exchange, requests[0])
    await answer(service, exchange, requests, reply)


def chat_prompt(
    service: Service,
    exchange: Exchange,
    chat: ChatRequest,
    messages: Sequence[Message],
    tools: Tools | None,
    on_full: OnFull,
    opening: PictureOpening | None,
) -> Prompt:
    """The prompt of a conversation. Its tokens are counted by the headers of pictures, and those it shows decoded then.

    Args:
        service: its tokenizer and templates are used.
        exchange: the request; its answer has a header that counts the messages that were dropped.
        chat: what is asked.
        messages: as templates take them, with pictures by number.
        tools: that the answer may call.
        on_full: whether the oldest turns are dropped.
        opening: opens the pictures; None if there are none.

    Raises:
        ApiError: as `Exchange.check`, or too many pixels.
        ContextFullError: the conversation is longer than the context, and no turn may be dropped.
        UsageError: the template refuses the messages, or a picture cannot be read.
    """
    texts, pictures = service.texts, service.pictures
    templates = texts.chat_templates
    variables = chat.template_variables(templates)
    sizes = [] if opening is None else [opening.size(number) for number in range(len(opening.opened))]

    def render(kept: Sequence[Message]) -> str:
        exchange.check()
        if not sizes:
            return chat.rendered(templates, kept, tools, variables)
        shown = [sizes[number] for number in pictures_in(kept)]
        return pictures.rendered(kept, shown, lambda told: chat.rendered(templates, told, tools, variables))

    while True:
        try:
            prompt = texts.fit(messages, render, on_full=on_full, max_answer_tokens=chat.max_new_tokens)
        except UsageError as error:
            if not error.field.startswith("chat template"):
                raise
            raise UsageError("messages", got=error.got, expected=error.expected, fix=error.fix) from None
        if opening is None:
            break
        shown = pictures_in(prompt.messages)
        grids = {number: sizes[number].grid for number in shown}
        _check_pixels(opening, grids)
        for number in shown:
            exchange.check()
            sizes[number] = opening.open(number)
        if all(sizes[number].grid == grid for number, grid in grids.items()):
            opened = tuple(size for number in shown if isinstance(size := sizes[number], Picture))
            prompt = replace(prompt, tokens=pictures.put(prompt.tokens, opened), pictures=opened)
            break  # otherwise a PNG said behind its pixels that it is turned
    if prompt.dropped_messages:
        exchange.headers.append((DROPPED_HEADER, str(prompt.dropped_messages).encode()))
    return prompt


def _check_pixels(opening: PictureOpening, grids: Mapping[int, TileGrid]) -> None:
    total = 0
    for number, grid in grids.items():
        total += grid.size[0] * grid.size[1]
        if total > MAX_PIXELS:
            got, expected = f"pictures of {total:,} pixels up to this one", f"at most {MAX_PIXELS:,} in a prompt"
            raise refused(opening.sent[number].field, got=got, expected=expected, fix="Resize them first.")


@dataclass(slots=True)
class _Answer:
    """One of the answers so far.

    Attributes:
        has_begun: whether a stream has named the role.
        logprob: of the next token, if it was asked for.
        text: so far, as all that follows; in streams only the calls are kept.
        thoughts: of the model.
        calls: of tools.
        logprobs: of the tokens.
    """

    has_begun: bool = False
    logprob: TokenLogprob | None = None
    text: str = ""
    thoughts: str = ""
    calls: list[CallRecord] = field(default_factory=list)
    logprobs: list[ContentLogprob] = field(default_factory=list)

    def reason(self, reason: FinishReason | None) -> FinishReason | None:
        """Why it ended, for a client."""
        return "tool_calls" if self.calls and reason == "stop" else reason


class _Reply:
    """See `edgekv.serve.answers.Reply`."""

    def __init__(self, service: Service, request: ChatRequest) -> None:
        """Begin the answers.

        Raises:
            ApiError: too many answers, or too many log-probabilities.
        """
        self._names = service.names
        self._model = request.model or service.name
        self._request = request
        self.n = request.choices(1, service.limits)
        self.streams = bool(request.stream)
        self.top_logprobs = check_top_logprobs("top_logprobs", request.top_logprobs or 0)
        self._id = f"chatcmpl-{uuid4().hex}"
        self._created = int(time.time())
        self._answers = [_Answer() for _ in range(self.n)]

    def head(self) -> bytes:
        return b""

    def add(self, index: int, happened: Token | TokenLogprob | tuple[TokenLogprob, ...] | FinishReason) -> bytes:
        so_far, streams = self._answers[index], self.streams
        if isinstance(happened, TokenLogprob):  # its token follows
            so_far.logprob = happened
            return b""
        if isinstance(happened, tuple):
            return b""
        data = b""
        if streams and not so_far.has_begun:  # with the first token: a write of its own costs as much as a token's
            so_far.has_begun = True
            data = self._chunk(ChunkChoice(Delta("assistant", ""), index=index))
        if isinstance(happened, str):
            return data + self._chunk(ChunkChoice(Delta(), so_far.reason(happened), index=index)) if streams else b""
        logprobs, so_far.logprob = self._logprobs(so_far.logprob), None
        calls = self._calls(happened, len(so_far.calls))
        so_far.calls += calls
        if not streams:
            so_far.text += happened.text
            so_far.thoughts += happened.thoughts or ""
            so_far.logprobs += logprobs
            return b""
        if happened.thoughts:
            data += self._chunk(ChunkChoice(Delta(reasoning_content=happened.thoughts), index=index))
        if happened.text or logprobs:
            choice_logprobs = ChoiceLogprobs(logprobs) if logprobs else None
            data += self._chunk(ChunkChoice(Delta(content=happened.text), logprobs=choice_logprobs, index=index))
        if calls:
            data += self._chunk(ChunkChoice(Delta(tool_calls=calls), index=index))
        return data

    def tail(self, answers: Sequence[PendingAnswer]) -> bytes:
        usage = event(self._made([], Usage.of(answers, self.n))) if self._request.includes_usage else b""
        return usage + DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.body)

    def whole(self, answers: Sequence[PendingAnswer]) -> ChatCompletion:
        choices = [
            Choice(
                AnswerMessage(
                    so_far.text or (None if so_far.calls else ""),
                    reasoning_content=so_far.thoughts or UNSET,
                    tool_calls=so_far.calls or UNSET,
                ),
                so_far.reason(answer.reason),
                ChoiceLogprobs(so_far.logprobs) if self._request.logprobs else None,
                answer.index,
            )
            for so_far, answer in zip(self._answers, answers, strict=True)
        ]
        usage = Usage.of(answers, self.n)
        return ChatCompletion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _chunk(self, choice: ChunkChoice) -> bytes:
        return event(self._made([choice], None if self._request.includes_usage else UNSET))

    def _made(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> Chunk:
        return Chunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _calls(self, token: Token, first: int) -> list[CallRecord]:
        """The calls that a token completes; their numbers begin with `first`."""
        return [
            CallRecord(
                f"call_{uuid4().hex[:24]}",
                FunctionRecord(call.name, call.arguments),
                number if self.streams else UNSET,
            )
            for number, call in enumerate(token.tool_calls, first)
        ]

    def _logprobs(self, logprob: TokenLogprob | None) -> list[ContentLogprob]:
        if logprob is None:
            return []
        own = TopLogprob.of(logprob.token, self._names)
        top = [TopLogprob.of(likelihood, self._names) for likelihood in logprob.top]
        return [ContentLogprob(own.token, own.logprob, own.bytes, top)]
