"""The model that is served, and the answers to requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from edgekv.bundle import lora_names, open_lora
from edgekv.engine import POOLED, LoraChoice, Request
from edgekv.errors import UsageError
from edgekv.full_context import fit_prompt
from edgekv.load_options import OnFull
from edgekv.model import Model
from edgekv.pictures import Picture
from edgekv.serve.channel import Channel
from edgekv.serve.engine_thread import EngineThread, Wanted
from edgekv.serve.errors import ApiError, refused
from edgekv.serve.exchange import DROPPED_HEADER, Exchange
from edgekv.serve.form import AnswerForm
from edgekv.serve.logprobs import TokenNames
from edgekv.serve.messages import template_messages
from edgekv.serve.metrics import Metrics
from edgekv.serve.options import ServeOptions
from edgekv.serve.pictures import MessagePictures
from edgekv.serve.response_store import ResponseStore
from edgekv.serve.sampling import SamplingFields
from edgekv.spec.chat import Message, check_messages, pictures_in
from edgekv.text import SamplingParams, Tools
from edgekv.text.processors import check_bias
from edgekv.text.tools import render_with_tools

T = TypeVar("T")
R = TypeVar("R", bound=SamplingFields)
LONG_CHARACTERS = 4_096
"""Longer texts and requests are read in another thread, so that other requests need not wait."""
_TAKEN = {"messages", "tools", "add_generation_prompt", "name", "self"}


@dataclass(frozen=True, slots=True)
class PicturedPrompt:
    """The tokens of a prompt, and the pictures whose rows are among them."""

    tokens: tuple[int, ...]
    pictures: tuple[Picture, ...] = ()


class Service:
    """What the paths of the API share.

    Attributes:
        model: only its tokenizer and templates may be used outside of the engine's thread.
        name: its id.
        created: when the server started, in seconds since 1970.
        names: texts of single tokens.
        metrics: counters.
        engine: drives the engine.
        responses: answers that later requests can continue.
        limits: what a client may use.
        on_full: what happens to conversations that are longer than the context.
    """

    def __init__(self, model: Model, options: ServeOptions) -> None:
        self.model = model
        self.name = options.name or model.bundle.path.resolve().name
        self.created = int(time.time())
        self.names = TokenNames(model.tokenizer)
        self.metrics = Metrics(is_reproducible=model.is_reproducible)
        self.limits = options.limits
        self.on_full = options.on_full
        self.responses = ResponseStore(options.limits.stored_responses, len(options.keys))
        self.speculation = options.speculate
        self.engine = EngineThread(model.engine, options.limits, self.metrics, batches=options.batches)

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together."""
        return self.model.bundle.manifest.context

    def check_name(self, name: str | None) -> str | None:
        """The adapters that a name of a model asks for, behind a colon; None for the base model, which needs no name.

        Raises:
            ApiError: 404, another model, or adapters that the bundle does not have.
            AdapterError: one of them is damaged.
        """
        if name is None:
            return None
        base, colon, lora = name.partition(":")
        try:
            if name != self.name and (base != self.name or not colon):
                raise UsageError("model", got=repr(name[:80]), expected=repr(self.name), fix="See GET /v1/models")
            if name == self.name:
                return None
            for choice in LoraChoice.parse(lora, "model"):
                open_lora(self.model.bundle, choice.name)
            return lora
        except UsageError as error:
            raise ApiError(404, str(error), param="model", code="model_not_found") from None

    @property
    def has_chat(self) -> bool:
        """Whether the bundle has a chat template."""
        try:
            return bool(self.model.chat_templates)
        except UsageError:
            return False

    @property
    def model_names(self) -> list[str]:
        """The names of all models: of the base, and of each adapter."""
        return [self.name, *(f"{self.name}:{name}" for name in lora_names(self.model.bundle))]

    async def accept(self, exchange: Exchange, kind: type[R]) -> tuple[R, str | None]:
        """A request for text, and the adapters that it asks for.

        Raises:
            ApiError: it is malformed, asks for another model, or for what is not supported.
            AdapterError: an adapter is damaged.
            DisconnectedError: the client has gone.
        """
        request = await exchange.read(kind)
        lora = self.check_name(request.model)
        request.check()
        exchange.name_of = request.name_of
        return request, lora

    async def apart(self, exchange: Exchange, work: Callable[[], T]) -> T:
        """The result of work on a request, in another thread if the request is long.

        Raises:
            EdgeKVError: as the work.
        """
        return work() if exchange.body_bytes <= LONG_CHARACTERS else await asyncio.to_thread(work)

    async def rendered(
        self,
        exchange: Exchange,
        messages: Sequence[Mapping[str, Any]],
        form: AnswerForm,
        variables: Mapping[str, Any] | None = None,
        *,
        wanted_tokens: int | None = None,
        on_full: OnFull | None = None,
    ) -> PicturedPrompt:
        """The tokens of a conversation and its pictures, rendered by the bundle's chat template.

        Args:
            exchange: the request; its answer has a header that counts the messages that were dropped.
            messages: as the API has them.
            form: has the tools to declare.
            variables: further variables of the template.
            wanted_tokens: the most tokens to generate; None for as many as the context has room for.
            on_full: whether the oldest turns are dropped; None for the server's option.

        Raises:
            ApiError: content that is neither text nor a picture, or a variable that the messages set.
            ContextFullError: the conversation is longer than the context, and no turn may be dropped.
            UsageError: the bundle has no template, or it refuses the messages.
        """
        templates = self.model.chat_templates
        has_developer = any("developer" in source for source in templates.templates.values())
        opened = MessagePictures(self.model.pictures)
        wanted = await self.apart(exchange, lambda: template_messages(messages, opened, has_developer=has_developer))
        given = dict(variables or {})
        if taken := given.keys() & _TAKEN:
            fix = "Leave it out."
            raise refused("chat_template_kwargs", got=min(taken), expected="other variables", fix=fix)
        check_messages(wanted)

        def pictures(kept: Sequence[Message]) -> list[Picture]:
            return [opened.found[number] for number in pictures_in(kept)]

        def render(kept: Sequence[Message]) -> str:
            text = render_with_tools(templates, kept, form.tools, **given)
            return self.model.pictures.expanded(text, pictures(kept))

        try:
            fitted = await asyncio.to_thread(  # a template may take up to its time limit
                fit_prompt,
                self.model,
                wanted,
                render,
                on_full=on_full or self.on_full,
                wanted_tokens=wanted_tokens,
            )
        except UsageError as error:
            if not error.field.startswith("chat template"):
                raise
            raise UsageError("messages", got=error.got, expected=error.expected, fix=error.fix) from None
        if fitted.dropped_messages:
            exchange.headers.append((DROPPED_HEADER, str(fitted.dropped_messages).encode()))
        shown = tuple(pictures(fitted.messages))
        return PicturedPrompt(self.model.pictures.put(fitted.tokens, shown), shown)

    async def turn(
        self,
        exchange: Exchange,
        prompt: PicturedPrompt,
        fields: SamplingFields,
        form: AnswerForm,
        wanted_tokens: int | None,
        top_logprobs: int | None = None,
        lora: str | None = None,
    ) -> Wanted:
        """What a conversation's next turn asks of the engine.

        Args:
            exchange: the request.
            prompt: the conversation, as `rendered` gives it.
            fields: how to sample.
            form: what the answer has to be.
            wanted_tokens: the most tokens to generate; None for as many as the context has room for.
            top_logprobs: how many of the most likely tokens to report; None for no log-probabilities.
            lora: adapters, as `Model.generate` takes them.

        Raises:
            UsageError: a value out of range, or a grammar that is wrong or too complex.
        """
        most = self.context - len(prompt.tokens) + 1 if wanted_tokens is None else wanted_tokens
        params = fields.params(self.model.defaults, most)
        if form.grammar is not None or form.tools is not None:
            # What is compiled is kept; a grammar that takes seconds holds up nobody here.
            await asyncio.to_thread(self.model.engine.texts.bind, form.grammar, form.tools)
            params = replace(params, grammar=form.grammar)
        shown = prompt.pictures
        return self.wanted(exchange, prompt.tokens, params, top_logprobs, tools=form.tools, lora=lora, pictures=shown)

    def wanted(
        self,
        exchange: Exchange,
        prompt: tuple[int, ...],
        params: SamplingParams | None,
        top_logprobs: int | None,
        scored_tokens: int = 0,
        *,
        tools: Tools | None = None,
        lora: str | None = None,
        pictures: tuple[Picture, ...] = (),
    ) -> Wanted:
        """What a request asks of the engine.

        Args:
            exchange: the request.
            prompt: token ids.
            params: how to sample; None generates nothing.
            top_logprobs: how many of the most likely tokens to report; None for no log-probabilities.
            scored_tokens: log-probabilities of so many tokens at the end of the prompt are reported.
            tools: functions that the answer may call.
            lora: adapters, as `Model.generate` takes them.
            pictures: whose rows are in the prompt.

        Raises:
            UsageError: a bias of a token outside of the vocabulary: the headers of a stream do not wait for the engine.
        """
        if params is not None:
            check_bias(params, self.model.bundle.manifest.model.vocab)
        request = Request(
            prompt,
            params,
            POOLED if params is not None else None,
            salt=exchange.salt,
            tools=tools,
            speculation=self.speculation,
            lora=lora,
            returns_logits=top_logprobs is not None,
            scores=scored_tokens > 0,
            pictures=pictures,
        )
        return Wanted(request, top_logprobs or 0, scored_tokens)

    @asynccontextmanager
    async def answering(self, exchange: Exchange, wanted: Sequence[Wanted]) -> AsyncIterator[Channel]:
        """The events of a request's answers, which end with the block or when the client goes.

        Raises:
            ApiError: the queue is full, or the server is stopping.
        """
        channel = Channel()
        tickets = self.engine.submit(wanted, channel)

        async def watch() -> None:
            await exchange.wait_until_gone()
            self.engine.cancel(tickets)

        watcher = asyncio.create_task(watch())
        try:
            yield channel
        finally:
            watcher.cancel()
            self.engine.cancel(tickets)
            channel.close()
            with suppress(asyncio.CancelledError):
                await watcher
