"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

import msgspec
from msgspec import UNSET, UnsetType

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
from edgekv.serve.http import DONE, Exchange, event
from edgekv.serve.logprobs import TokenLogprob, TokenNames
from edgekv.serve.service import Service
from edgekv.serve.work import Job
from edgekv.spec.text import text_offsets
from edgekv.text.grammar import Grammar
from edgekv.text.output import Detokenizer, decode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_TOKENS = 16


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """The body of a request."""

    path: ClassVar[str] = "/v1/completions"
    names: ClassVar[dict[str, str]] = {**SamplingFields.names, "max_new_tokens": "max_tokens"}

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None
    response_format: ResponseFormat | None = None

    unsupported: ClassVar[dict[str, Unsupported]] = {
        "add_special_tokens": Unsupported("Send token ids for a prompt without them.", (True,)),
        "max_completion_tokens": Unsupported("Use max_tokens."),
        "max_output_tokens": Unsupported("Use max_tokens."),
        "top_logprobs": Unsupported("Use logprobs, the number of tokens to report.", (0,)),
    }

    def asked_format(self) -> tuple[str, ResponseFormat] | None:
        return None if self.response_format is None else ("response_format", self.response_format)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt: text, or token ids.

        Raises:
            ApiError: no prompt, or a mixture.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(each) for each in self.prompt}
        if len(kinds) != 1:
            found = "an empty list" if not kinds else "a mixture"
            raise refused("prompt", got=found, expected="texts or token ids", fix="Give a text, or a list of one kind.")
        if kinds == {int}:
            return [[each for each in self.prompt if isinstance(each, int)]]
        return [each for each in self.prompt if not isinstance(each, int)]

    def prompt_field(self, index: int) -> str:
        """The place of a prompt in the request."""
        return f"prompt[{index}]" if isinstance(self.prompt, list) and not isinstance(self.prompt[0], int) else "prompt"

    def check(self) -> None:
        super().check()
        if self.suffix not in (None, ""):
            raise refused("suffix", got="a text", expected="nothing", fix="This model continues text; leave it out.")


class CompletionLogprobs(msgspec.Struct):
    """`logprobs` of a choice, by token; the first token of a text has none."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def add(self, found: TokenLogprob, offset: int, names: TokenNames) -> None:
        """Add a token that begins at a character of the text."""
        self.tokens.append(names.text(found.token.id))
        self.token_logprobs.append(None if found.is_first else found.token.logprob)
        self.top_logprobs.append(None if found.is_first else {names.text(each.id): each.logprob for each in found.top})
        self.text_offset.append(offset)


class CompletionChoice(msgspec.Struct, frozen=True):
    """An answer, or a part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request, or an event of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


async def completions(service: Service, exchange: Exchange) -> None:
    """Continue texts.

    Raises:
        ApiError, EdgeKVError: the request is refused.
        DisconnectedError: the client has gone.
    """
    body = await exchange.body()

    def read(job: Job) -> tuple[list[Wanted], _Reply, Grammar | None]:
        request, lora = accept(service, exchange, body, CompletionRequest)
        constraint = request.constraint()
        grammar = None if constraint is None else constraint[1]()
        prompts = request.prompts
        n = request.choices(len(prompts), service.limits)
        wanted, answers = list[Wanted](), list[_Answer]()
        for at, prompt in enumerate(prompts):
            job.check()
            asked = _wanted(service, exchange, request, at, grammar, lora)
            wanted += for_answers([asked], n)
            answers += [_answer(service, request, prompt, asked.request.tokens) for _ in range(n)]
        new = None if service.texts.is_bound(grammar, None, exchange.cache_salt) else grammar
        return wanted, _Reply(service, request, answers, n), new

    wanted, reply, new = await exchange.work(service.lanes.texts, read)
    if new is not None:
        await exchange.work(service.lanes.grammars, lambda _: service.texts.bind(new, None, exchange.cache_salt))
    await answer(service, exchange, wanted, reply, n=reply.n, streams=reply.streams)


def _wanted(
    service: Service,
    exchange: Exchange,
    request: CompletionRequest,
    index: int,
    grammar: Grammar | None,
    lora: str | None,
) -> Wanted:
    """What the prompt with this index asks of the engine.

    Raises:
        EdgeKVError: the prompt is refused, or a value out of range.
    """
    texts, prompt, field = service.texts, request.prompts[index], request.prompt_field(index)
    if isinstance(prompt, str):
        tokens = texts.read(prompt, field)
        given = len(texts.encode(prompt)) if request.echo and request.logprobs is not None else len(tokens)
    else:
        tokens, given = texts.read(prompt, field), len(prompt)
    top = None if request.logprobs is None else check_top_logprobs("logprobs", request.logprobs)
    wanted = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
    only_echo = bool(request.echo) and wanted == 0
    most = 1 if only_echo else check_wanted_tokens("max_tokens", wanted) or 1
    params = replace(request.params(service.model.defaults, most), grammar=grammar)
    scored = min(given, len(tokens)) if request.echo and (top is not None or only_echo) else 0
    return wanted_of(service, exchange, tuple(tokens), None if only_echo else params, top, scored, lora=lora)


def _answer(service: Service, request: CompletionRequest, prompt: str | list[int], tokens: Sequence[int]) -> _Answer:
    """An answer that has not begun.

    Args:
        service: has the tokenizer.
        request: says whether the prompt is echoed.
        prompt: as the request has it.
        tokens: those that are run.
    """
    tokenizer = service.texts.tokenizer
    text, offsets = "", list[int]()
    if request.echo:
        text = prompt if isinstance(prompt, str) else decode(tokenizer, prompt, skip_special_tokens=False)
        if request.logprobs is not None:
            offsets = text_offsets(tokenizer, prompt) if isinstance(prompt, str) else _offsets(tokenizer, prompt)
    return _Answer(text, _empty(request), offsets, Detokenizer(tokenizer, tokens), len(text))


def _offsets(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """Where each token begins in the text of all of them, in characters."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    return [*accumulate((len(detokenizer.push(token)) for token in tokens[:-1]), initial=0)]


def _empty(request: CompletionRequest) -> CompletionLogprobs | None:
    return None if request.logprobs is None else CompletionLogprobs([], [], [], [])


@dataclass(slots=True)
class _Answer:
    """What has been collected of an answer and not been sent.

    Attributes:
        text: of the prompt, if it is echoed, and of the answer.
        logprobs: None unless they were asked for.
        prompt_offsets: where the tokens of the prompt begin in the text.
        detokenizer: of the generated tokens.
        offset: where the next token begins, in characters.
    """

    text: str
    logprobs: CompletionLogprobs | None
    prompt_offsets: list[int]
    detokenizer: Detokenizer
    offset: int

    def add(self, event: Piece | PromptLogprobs, names: TokenNames) -> None:
        """Take an event in."""
        if isinstance(event, PromptLogprobs):
            if self.logprobs is not None:
                # An empty prompt becomes BOS, which has no text.
                offsets = [0] * (len(event.tokens) - len(self.prompt_offsets)) + self.prompt_offsets
                for token, offset in zip(event.tokens, offsets[-len(event.tokens) :], strict=True):
                    self.logprobs.add(token, offset, names)
            return
        self.text += event.text
        if self.logprobs is not None and event.logprob is not None:
            self.logprobs.add(event.logprob, self.offset, names)
            self.offset += len(self.detokenizer.push(event.logprob.token.id))


class _Reply:
    """See `edgekv.serve.generation.Reply`.

    Attributes:
        n: answers to each prompt.
        streams: whether it is a stream.
    """

    def __init__(self, service: Service, request: CompletionRequest, answers: list[_Answer], n: int) -> None:
        self._names = service.names
        self._model = request.model or service.name
        self._request = request
        self.streams = bool(request.stream)
        self._answers = answers
        self.n = n
        self._id = f"cmpl-{uuid4().hex}"
        self._created = int(time.time())

    def head(self) -> bytes:
        return b""

    def add(self, index: int, happened: Piece | PromptLogprobs | Finished) -> bytes:
        so_far, reason = self._answers[index], None
        if isinstance(happened, Finished):
            reason = happened.reason
        else:
            so_far.add(happened, self._names)
        has_news = so_far.text or (so_far.logprobs and so_far.logprobs.tokens) or reason
        if not (self.streams and has_news):
            return b""
        data = self._event([CompletionChoice(index, so_far.text, so_far.logprobs, reason)])
        so_far.text, so_far.logprobs = "", _empty(self._request)
        return data

    def tail(self, ends: Sequence[Finished]) -> bytes:
        usage = self._event([], Usage.of(ends, self.n)) if self._request.includes_usage else b""
        return usage + DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.body)

    def whole(self, ends: Sequence[Finished]) -> Completion:
        pairs = zip(self._answers, ends, strict=True)
        choices = [CompletionChoice(at, each.text, each.logprobs, end.reason) for at, (each, end) in enumerate(pairs)]
        return self._made(choices, Usage.of(ends, self.n))

    def _event(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        return event(self._made(choices, usage if self._request.includes_usage else UNSET))

    def _made(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)
