"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import UNSET, UnsetType

from edgekv.serve.errors import ApiError, refused
from edgekv.serve.events import Event, Finished, FinishReason, Piece, PromptLogprobs
from edgekv.serve.exchange import Exchange
from edgekv.serve.job import Work
from edgekv.serve.logprobs import TokenLogprob, TokenNames
from edgekv.serve.options import Limits
from edgekv.serve.sampling import SamplingFields, check_top_logprobs, check_wanted_tokens
from edgekv.serve.service import Service
from edgekv.serve.sse import DONE, event, stream
from edgekv.serve.usage import Usage

DEFAULT_TOKENS = 16
MOST_PROMPTS = 32

_encode = msgspec.json.Encoder().encode


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """The body of a request."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None

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
            fix = "Give a text, token ids, or a list of either."
            raise refused("prompt", got="no prompt" if not kinds else "a mixture", expected="one kind", fix=fix)
        if kinds == {int}:
            return [[each for each in self.prompt if isinstance(each, int)]]
        return [each for each in self.prompt if not isinstance(each, int)]

    def check(self, limits: Limits) -> None:
        """Refuse what is not supported, or can never run.

        Raises:
            ApiError: naming the field.
        """
        if len(self.prompts) > (most := min(MOST_PROMPTS, limits.sessions + limits.queue)):
            found, wanted = f"{len(self.prompts)} prompts", f"at most {most}, which run or wait together"
            raise refused("prompt", got=found, expected=wanted, fix="Send several requests.")
        if self.suffix is not None:
            raise refused("suffix", got="a text", expected="nothing", fix="This model continues text; leave it out.")
        if self.stream and len(self.prompts) > 1:
            found, fix = f"{len(self.prompts)} prompts with stream", "Send a request for each."
            raise refused("prompt", got=found, expected="one", fix=fix)


class CompletionLogprobs(msgspec.Struct):
    """`logprobs` of a choice, by token; the first token of a text has none."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def add(self, found: TokenLogprob, offset: int, names: TokenNames) -> int:
        """Add a token; returns the length of its text."""
        text = names.text(found.token.id)
        self.tokens.append(text)
        self.token_logprobs.append(None if found.is_first else found.token.logprob)
        self.top_logprobs.append(None if found.is_first else {names.text(each.id): each.logprob for each in found.top})
        self.text_offset.append(offset)
        return len(text)


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
        ApiError: the request is refused.
        EdgeKVError: likewise.
        DisconnectedError: the client has gone.
    """
    request = await exchange.read(CompletionRequest)
    lora = service.check_name(request.model)
    request.check(service.limits)
    prompts = list(enumerate(request.prompts))
    replies = await service.apart(
        exchange, lambda: [_reply(service, exchange, request, at, each, lora) for at, each in prompts]
    )
    identity, created = f"cmpl-{uuid4().hex}", int(time.time())

    def made(choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(id=identity, created=created, model=request.model, choices=choices, usage=usage)

    if not request.stream:
        tasks = [asyncio.ensure_future(_run(service, exchange, reply)) for reply in replies]
        try:
            ends = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        await exchange.reply(
            made([reply.choice(end.reason) for reply, end in zip(replies, ends, strict=True)], Usage.of(*ends))
        )
        return
    reply, usage = replies[0], None if request.includes_usage else UNSET

    def told(events: Sequence[Event]) -> tuple[bytes, bool]:
        data = b""
        for each in events:
            if isinstance(each, ApiError):
                return data + event(_encode(each.body)), True
            end = reply.add(each)
            if end is not None or reply.has_news:
                data += event(_encode(made([reply.choice(end.reason if end else None)], usage)))
                reply.forget()
            if end is not None:
                if request.includes_usage:
                    data += event(_encode(made([], Usage.of(end))))
                return data + DONE, True
        return data, False

    async with service.job(exchange, reply.work) as channel:
        await stream(exchange, channel, b"", told)


async def _run(service: Service, exchange: Exchange, reply: _Reply) -> Finished:
    async with service.job(exchange, reply.work) as channel:
        while True:
            for each in await channel.take():
                if isinstance(each, ApiError):
                    raise each
                if (end := reply.add(each)) is not None:
                    return end


def _reply(
    service: Service,
    exchange: Exchange,
    request: CompletionRequest,
    index: int,
    prompt: str | list[int],
    lora: str | None,
) -> _Reply:
    """The work of one prompt, and what is sent for it.

    Raises:
        EdgeKVError: the prompt is refused, or a value out of range.
    """
    model = service.model
    if isinstance(prompt, str):
        tokens = model.read(prompt)
        given = len(model.encode(prompt)) if request.echo and request.logprobs is not None else len(tokens)
    else:
        tokens, given = model.read(prompt), len(prompt)
    top = None if request.logprobs is None else check_top_logprobs("logprobs", request.logprobs)
    wanted = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
    only_echo = bool(request.echo) and wanted == 0
    params = request.params(model.defaults, 1 if only_echo else check_wanted_tokens("max_tokens", wanted) or 1)
    scored = min(given, len(tokens)) if request.echo and (top is not None or only_echo) else 0
    work = Work(tuple(tokens), None if only_echo else params, exchange.salt, top, scored, lora=lora)
    echoed = ""
    if request.echo:
        echoed = prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt, skip_special_tokens=False)
    return _Reply(service, work, index, echoed)


class _Reply:
    """Collects the events of one prompt."""

    def __init__(self, service: Service, work: Work, index: int, echoed: str) -> None:
        self.work = work
        self._names = service.names
        self._index = index
        self._text = echoed
        self._offset = 0
        self._logprobs = self._empty()

    @property
    def has_news(self) -> bool:
        """Whether there is something to send."""
        return bool(self._text or (self._logprobs and self._logprobs.tokens))

    def add(self, each: Piece | PromptLogprobs | Finished) -> Finished | None:
        """Take an event in; returns it if it is the last."""
        if isinstance(each, Finished):
            return each
        if isinstance(each, PromptLogprobs):
            found: tuple[TokenLogprob, ...] = each.tokens
        else:
            found = () if each.logprob is None else (each.logprob,)
            self._text += each.text
        for token in found if self._logprobs else ():
            assert self._logprobs is not None
            self._offset += self._logprobs.add(token, self._offset, self._names)
        return None

    def choice(self, reason: FinishReason | None) -> CompletionChoice:
        """What has been collected."""
        return CompletionChoice(self._index, self._text, self._logprobs, reason)

    def forget(self) -> None:
        """What has been collected was sent."""
        self._text, self._logprobs = "", self._empty()

    def _empty(self) -> CompletionLogprobs | None:
        return None if self.work.top_logprobs is None else CompletionLogprobs([], [], [], [])
