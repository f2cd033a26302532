"""Who may use the API: checks in front of every path."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from email.utils import formatdate
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from edgekv.serve.errors import ApiError, DisconnectedError, api_error
from edgekv.serve.exchange import DROPPED_HEADER, Exchange, Receive, Scope, Send
from edgekv.serve.keys import ApiKeys
from edgekv.serve.metrics import Metrics
from edgekv.serve.options import LOOPBACK, ServeOptions
from edgekv.serve.request_log import RequestRecord, write_line

App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/", "/health")
"""Paths that need no key."""
POLLED = ("/health", "/metrics")
"""Paths that programs ask for every few seconds: only their failures are logged."""
_OTHER = "other"
_NAME = re.compile(r"\{[^}]*\}")


class Guard:
    """Checks the host and the API key, counts and logs answers, and turns exceptions into errors of the API.

    Pages of the allowed origins can read errors too.
    """

    def __init__(self, app: App, options: ServeOptions, metrics: Metrics, paths: Sequence[str]) -> None:
        self._app = app
        self._options = options
        self._keys = ApiKeys(options.keys)
        self._metrics = metrics
        self._shown_paths = ", ".join(dict.fromkeys(_NAME.sub("NAME", path) for path in paths))
        self._paths = frozenset(path for path in paths if "{" not in path)
        self._answer: App = self._checked
        if options.origins:
            self._answer = CORSMiddleware(
                self._checked,
                allow_origins=list(options.origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["Authorization", "Content-Type"],
                expose_headers=["Retry-After", DROPPED_HEADER.decode()],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else _OTHER
        scope["app"] = self  # asks the router to raise what it would answer
        record = scope["state"]["record"] = RequestRecord()

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                self._metrics.count_answer(path, record.status)
                message["headers"].append((b"date", formatdate(usegmt=True).encode()))
            await send(message)

        try:
            await self._answer(scope, receive, counted)
        finally:
            is_poll = scope["path"] in POLLED and record.status == 200
            if self._options.logs_requests and not is_poll:
                write_line(record.line(scope["method"], scope["raw_path"][:200].decode("ascii", "backslashreplace")))

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._options.limits)
        try:
            self._check(exchange)
            await self._app(scope, receive, send)
        except DisconnectedError:
            self._metrics.disconnects += 1
        except Exception as error:
            told = self._told(error, scope)
            exchange.record.error = told.code or told.body.error.type
            if exchange.record.has_begun:  # the status is out: all that is left is to end the connection
                raise
            after = () if told.retry_after_s is None else ((b"retry-after", str(told.retry_after_s).encode()),)
            await exchange.reply(told.body, told.status, after)

    def _check(self, exchange: Exchange) -> None:
        """Refuse foreign hosts and requests without a key.

        Raises:
            ApiError: 403, another host than this machine; 401, no accepted key.
        """
        scope = exchange.scope
        if self._options.is_local:
            # A foreign page whose name is made to resolve to this machine still sends its own name.
            host = (exchange.header(b"host") or b"").decode("latin-1")
            name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
            if name.strip("[]").lower() not in LOOPBACK:
                raise ApiError(403, f"host: got {host[:80]}; expected this machine. Use 127.0.0.1.", code="wrong_host")
        if self._keys.are_required and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
            salt = self._keys.salt(exchange.header(b"authorization"))
            if salt is None:
                message = "authorization: got no accepted key; expected one. Send the header Authorization: Bearer KEY."
                raise ApiError(401, message, code="invalid_api_key")
            scope["state"]["salt"] = salt

    def _told(self, error: Exception, scope: Scope) -> ApiError:
        if not isinstance(error, HTTPException):
            return api_error(error)
        path = repr(scope["path"][:200])
        if error.status_code == 405:
            allowed = sorted((error.headers or {}).get("Allow", "another method").split(", "))
            message = f"method: got {scope['method']} {path}; expected {' or '.join(allowed)}. Use it."
            return ApiError(405, message, code="wrong_method")
        message = f"path: got {path}; expected one of {self._shown_paths}. Correct it."
        return ApiError(error.status_code, message, code="not_found")
