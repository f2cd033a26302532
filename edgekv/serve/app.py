"""The paths of the API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec
from starlette.routing import Route, Router

from edgekv.errors import EdgeKVError
from edgekv.serve.chat import chat_completions
from edgekv.serve.completions import completions
from edgekv.serve.errors import ApiError, api_error
from edgekv.serve.exchange import Exchange, Receive, Scope, Send
from edgekv.serve.guard import App, Guard
from edgekv.serve.metrics import CONTENT_TYPE
from edgekv.serve.options import ServeOptions
from edgekv.serve.page import chat_page
from edgekv.serve.responses import create_response, delete_response, get_response
from edgekv.serve.service import Service

Handler = Callable[[Service, Exchange], Awaitable[None]]


class ModelRecord(msgspec.Struct, frozen=True):
    """A model, as `/v1/models` lists it."""

    id: str
    created: int
    context_length: int
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


class _Endpoint:
    """A path's handler as an ASGI application."""

    def __init__(self, handler: Handler, service: Service) -> None:
        self._handler = handler
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._service.limits)
        try:
            await self._handler(self._service, exchange)
        except (ApiError, EdgeKVError) as error:
            raise api_error(error).renamed(exchange.name_of) from None


async def models(service: Service, exchange: Exchange) -> None:
    """`GET /v1/models`."""
    await exchange.reply(ModelList([_record(service, name) for name in service.model_names]))


async def one_model(service: Service, exchange: Exchange) -> None:
    """`GET /v1/models/ID`.

    Raises:
        ApiError: another model.
    """
    name = exchange.scope["path_params"]["name"]
    service.check_name(name)
    await exchange.reply(_record(service, name))


async def embeddings(service: Service, exchange: Exchange) -> None:
    """`POST /v1/embeddings`.

    Raises:
        ApiError: always.
    """
    message = f"embeddings: {service.name} generates text and has no embeddings. Ask a server with a model for them."
    raise ApiError(400, message, code="not_supported")


async def health(service: Service, exchange: Exchange) -> None:
    """`GET /health`."""
    await exchange.reply(Health("ok", service.engine.running, service.engine.queued))


async def metrics(service: Service, exchange: Exchange) -> None:
    """`GET /metrics`."""
    text = service.metrics.text(service.model.engine.texts.compiling_grammars)
    await exchange.send_bytes(text.encode(), CONTENT_TYPE.encode())


_PATHS: Sequence[tuple[str, str, Handler]] = (
    ("GET", "/", chat_page),
    ("GET", "/health", health),
    ("GET", "/metrics", metrics),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{name:path}", one_model),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/v1/responses", create_response),
    ("GET", "/v1/responses/{name}", get_response),
    ("DELETE", "/v1/responses/{name}", delete_response),
)


def make_app(service: Service, options: ServeOptions) -> App:
    """The application: paths behind the checks of every request."""
    routes = [Route(path, _Endpoint(handler, service), methods=[method]) for method, path, handler in _PATHS]
    paths = [path for _, path, _ in _PATHS]
    return Guard(Router(routes, redirect_slashes=False), options, service.metrics, paths)


def _record(service: Service, name: str) -> ModelRecord:
    return ModelRecord(name, service.created, service.context)
