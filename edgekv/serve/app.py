"""The paths of the API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from edgekv.serve.chat import chat_completions
from edgekv.serve.completions import completions
from edgekv.serve.embeddings import embeddings
from edgekv.serve.http import App, Bodies, Exchange, Guard, Handler, Routes
from edgekv.serve.metrics import CONTENT_TYPE
from edgekv.serve.options import ServeOptions
from edgekv.serve.page import chat_page
from edgekv.serve.rerank import rerank
from edgekv.serve.responses import Responses, ResponseStore
from edgekv.serve.service import Service
from edgekv.serve.tokenize import detokenize, tokenize


class ChatSampling(msgspec.Struct, frozen=True):
    """How chats are sampled that ask for nothing; see `SamplingParams`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float
    repetition_penalty: float


class ModelRecord(msgspec.Struct, frozen=True):
    """A model, as `/v1/models` lists it.

    Attributes:
        context_length: in tokens.
        input_modalities: what it reads: text, and for some images.
        default_sampling: of chats.
    """

    id: str
    created: int
    context_length: int
    input_modalities: tuple[str, ...]
    default_sampling: ChatSampling
    object: str = "model"
    owned_by: str = "edgekv"


class ModelList(msgspec.Struct, frozen=True):
    """All models: the base, and each of its adapters."""

    data: list[ModelRecord]
    object: str = "list"


class Health(msgspec.Struct, frozen=True):
    """That the server answers, and how busy it is."""

    status: str
    running: int
    queued: int


async def models(service: Service, exchange: Exchange) -> None:
    """`GET /v1/models`."""
    await exchange.reply(ModelList([_record(service, name) for name in service.model_names]))


async def one_model(service: Service, exchange: Exchange) -> None:
    """`GET /v1/models/ID`.

    Raises:
        ApiError: another model.
    """
    exchange.watch()
    await service.work.run(exchange, "text", lambda: service.check_name(exchange.name))
    await exchange.reply(_record(service, exchange.name))


async def health(service: Service, exchange: Exchange) -> None:
    """`GET /health`."""
    await exchange.reply(Health("ok", service.engine.running, service.engine.queued + service.work.waiting))


async def metrics(service: Service, exchange: Exchange) -> None:
    """`GET /metrics`."""
    text = service.metrics.text(service.texts.compiling_grammars)
    await exchange.send_bytes(text.encode(), CONTENT_TYPE.encode())


def make_app(service: Service, options: ServeOptions) -> App:
    """The application: paths behind the checks of every request."""

    def of(handler: Callable[[Service, Exchange], Awaitable[None]]) -> Handler:
        return partial(handler, service)

    responses = Responses(service, ResponseStore(options.limits.stored_responses, len(options.keys)))
    paths = (
        ("GET", "/", chat_page),
        ("GET", "/health", of(health)),
        ("GET", "/metrics", of(metrics)),
        ("GET", "/v1/models", of(models)),
        ("GET", "/v1/models/NAME", of(one_model)),
        ("POST", "/v1/chat/completions", of(chat_completions)),
        ("POST", "/v1/completions", of(completions)),
        ("POST", "/v1/embeddings", of(embeddings)),
        ("POST", "/rerank", of(rerank)),
        ("POST", "/v1/rerank", of(rerank)),
        ("POST", "/v2/rerank", of(rerank)),
        ("POST", "/tokenize", of(tokenize)),
        ("POST", "/detokenize", of(detokenize)),
        ("POST", "/v1/responses", responses.create),
        ("GET", "/v1/responses/NAME", responses.get),
        ("DELETE", "/v1/responses/NAME", responses.delete),
    )
    bodies = Bodies(options.limits, has_pictures=service.pictures.are_read)
    return Guard(Routes(paths), options, service.metrics, bodies)


def _record(service: Service, name: str) -> ModelRecord:
    read = ("text", "image") if service.pictures.are_read else ("text",)
    params = service.model.chat_defaults
    sampling = ChatSampling(params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty)
    return ModelRecord(name, service.created, service.context_length, read, sampling)
