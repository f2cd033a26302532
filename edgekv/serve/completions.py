"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

import msgspec
from msgspec import UNSET, UnsetType

from edgekv.engine import Request
from edgekv.serve.answers import Usage, answer
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
from edgekv.serve.http import DONE, Exchange, event
from edgekv.serve.logprobs import TokenLogprob, TokenNames
from edgekv.serve.service import Service
from edgekv.spec.text import text_offsets
from edgekv.text import Token
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

    unsupported: ClassVar[dict[str, UnsupportedField]] = {
        "add_special_tokens": UnsupportedField("Send token ids for a prompt without them.", (True,)),
        "max_completion_tokens": UnsupportedField("Use max_tokens."),
        "max_output_tokens": UnsupportedField("Use max_tokens."),
        "top_logprobs": UnsupportedField("Use logprobs, the number of tokens to report.", (0,)),
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
        kinds = {type(member) for member in self.prompt}
        if len(kinds) != 1:
            got = "an empty list" if not kinds else "a mixture"
            raise refused("prompt", got=got, expected="texts or token ids", fix="Give a text, or a list of one kind.")
        if kinds == {int}:
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [text for text in self.prompt if not isinstance(text, int)]

    def prompt_field(self, index: int) -> str:
        """The place of a prompt in the request."""
        return f"prompt[{index}]" if isinstance(self.prompt, list) and not isinstance(self.prompt[0], int) else "prompt"

    @property
    def only_echoes(self) -> bool:
        """Whether nothing is generated."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def max_new_tokens(self) -> int:
        """The most tokens to generate.

        Raises:
            ApiError: out of range.
        """
        if self.only_echoes:
            return 1  # of which none is
        return check_max_tokens("max_tokens", self.max_tokens) or DEFAULT_TOKENS

    def check(self) -> None:
        super().check()
        if self.logprobs is not None:
            check_top_logprobs("logprobs", self.logprobs)
        if self.suffix not in (None, ""):
            raise refused("suffix", got="a text", expected="nothing", fix="This model continues text; leave it out.")


class CompletionLogprobs(msgspec.Struct):
    """`logprobs` of a choice, by token; the first token of a text has none."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def add(self, logprob: TokenLogprob, offset: int, names: TokenNames) -> None:
        """Add a token that begins at a character of the text."""
        self.tokens.append(names.text(logprob.token.id))
        self.token_logprobs.append(None if logprob.is_first else logprob.token.logprob)
        self.top_logprobs.append(
            None if logprob.is_first else {names.text(likelihood.id): likelihood.logprob for likelihood in logprob.top}
        )
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

    def read() -> tuple[list[Request], _Reply, bool]:
        asked, lora = accept(service, exchange, body, CompletionRequest)
        n = asked.choices(len(asked.prompts), service.limits)
        vocab = service.model.bundle.manifest.model.vocab
        params = asked.params(service.model.defaults, vocab, asked.max_new_tokens, asked.read_grammar())
        reply = _Reply(service, asked, n)
        requests = list[Request]()
        for at, prompt in enumerate(asked.prompts):
            exchange.check()
            tokens = service.texts.read(prompt, asked.prompt_field(at))
            request = Request(
                tuple(tokens),
                None if asked.only_echoes else params,
                salt=exchange.cache_salt,
                speculation=service.speculation,
                lora=lora,
                returns_logits=asked.logprobs is not None,
                scores=reply.add_prompt(prompt, tokens),
            )
            requests += for_answers(request, n)
        return requests, reply, service.texts.is_bound(params.grammar, None, exchange.cache_salt)

    requests, reply, is_bound = await service.work.run(exchange, "text", read)
    if not is_bound:
        await compile_grammar(service, exchange, requests[0])
    await answer(service, exchange, requests, reply)


def _offsets(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """Where each token begins in the text of all of them, in characters."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    return [*accumulate((len(detokenizer.push(token)) for token in tokens[:-1]), initial=0)]


@dataclass(slots=True)
class _Answer:
    """What has been collected of an answer and not been sent.

    Attributes:
        text: of the prompt, if it is echoed, and of the answer.
        logprobs: None unless they were asked for.
        prompt_offsets: where the tokens of the prompt that are reported begin in the text.
        detokenizer: of the generated tokens; None without log-probabilities.
        offset: where the next token begins, in characters.
    """

    text: str
    logprobs: CompletionLogprobs | None
    prompt_offsets: list[int]
    detokenizer: Detokenizer | None
    offset: int

    def add(self, event: Token | TokenLogprob | tuple[TokenLogprob, ...], names: TokenNames) -> None:
        """Take an event in."""
        if isinstance(event, Token):
            self.text += event.text
        elif self.logprobs is None:  # those of the prompt are computed to echo it
            return
        elif isinstance(event, tuple):
            for token, offset in zip(event[-len(self.prompt_offsets) :], self.prompt_offsets, strict=True):
                self.logprobs.add(token, offset, names)
        else:
            self.logprobs.add(event, self.offset, names)
            if self.detokenizer is not None:
                self.offset += len(self.detokenizer.push(event.token.id))


class _Reply:
    """See `edgekv.serve.answers.Reply`."""

    def __init__(self, service: Service, request: CompletionRequest, n: int) -> None:
        self._texts = service.texts
        self._names = service.names
        self._model = request.model or service.name
        self._request = request
        self.streams = bool(request.stream)
        self.top_logprobs = request.logprobs or 0
        self.n = n
        self._answers: list[_Answer] = []
        self._id = f"cmpl-{uuid4().hex}"
        self._created = int(time.time())

    def add_prompt(self, prompt: str | list[int], tokens: Sequence[int]) -> bool:
        """Begin the answers to a prompt; whether its tokens are to be scored.

        Args:
            prompt: as the request has it.
            tokens: those that are run.
        """
        echoes, reports = bool(self._request.echo), self._request.logprobs is not None
        tokenizer = self._texts.tokenizer
        text, offsets = "", list[int]()
        if echoes:
            text = prompt if isinstance(prompt, str) else decode(tokenizer, prompt, skip_special_tokens=False)
        if echoes and reports:
            offsets = text_offsets(tokenizer, prompt) if isinstance(prompt, str) else _offsets(tokenizer, prompt)
            prompt_length = len(self._texts.encode(prompt)) if isinstance(prompt, str) else len(prompt)
            # An empty prompt becomes BOS, which has no text.
            offsets = ([0] * (prompt_length - len(offsets)) + offsets)[-min(prompt_length, len(tokens)) :]
        for _ in range(self.n):
            detokenizer = Detokenizer(tokenizer, tokens) if reports else None
            self._answers.append(_Answer(text, self._empty(), offsets, detokenizer, len(text)))
        return echoes and (reports or self._request.only_echoes)

    def head(self) -> bytes:
        return b""

    def add(self, index: int, happened: Token | TokenLogprob | tuple[TokenLogprob, ...] | FinishReason) -> bytes:
        so_far, reason = self._answers[index], None
        if isinstance(happened, str):
            reason = happened
        else:
            so_far.add(happened, self._names)
            if isinstance(happened, TokenLogprob):  # its token follows
                return b""
        has_news = so_far.text or (so_far.logprobs and so_far.logprobs.tokens) or reason
        if not (self.streams and has_news):
            return b""
        data = self._event([CompletionChoice(index, so_far.text, so_far.logprobs, reason)])
        so_far.text, so_far.logprobs = "", self._empty()
        return data

    def tail(self, answers: Sequence[PendingAnswer]) -> bytes:
        usage = self._event([], Usage.of(answers, self.n)) if self._request.includes_usage else b""
        return usage + DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.body)

    def whole(self, answers: Sequence[PendingAnswer]) -> Completion:
        pairs = enumerate(zip(self._answers, answers, strict=True))
        choices = [CompletionChoice(at, so_far.text, so_far.logprobs, answer.reason) for at, (so_far, answer) in pairs]
        return self._made(choices, Usage.of(answers, self.n))

    def _empty(self) -> CompletionLogprobs | None:
        return None if self._request.logprobs is None else CompletionLogprobs([], [], [], [])

    def _event(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        return event(self._made(choices, usage if self._request.includes_usage else UNSET))

    def _made(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)
