"""One HTTP request and its answer: a record, or server-sent events, as the HTML standard defines them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

import msgspec

from edgekv.serve.errors import ApiError, DisconnectedError, refused
from edgekv.serve.options import Limits
from edgekv.serve.request_log import RequestRecord

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
T = TypeVar("T")

JSON = b"application/json"
_MISSING = re.compile("missing required field `(.+)`")
DROPPED_HEADER = b"x-edgekv-dropped-messages"
"""How many of the request's oldest messages the model did not see; the header is there if it is not 0."""
EVENTS = b"text/event-stream; charset=utf-8"
WAITING = b": waiting\n\n"
"""A comment of a stream, which clients skip."""
DONE = b"data: [DONE]\n\n"
"""Ends a stream of completions."""

_encode = msgspec.json.Encoder().encode


def event(record: msgspec.Struct, name: str | None = None) -> bytes:
    """A server-sent event whose data is a record as JSON, which has no line break outside of its texts' escapes."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + _encode(record) + b"\n\n"


class Exchange:
    """Reads a request within the limits, and answers it.

    Attributes:
        scope: of ASGI.
        salt: of the request's API key; None without keys.
        record: what the log will say of it.
        name_of: the request's name of a field in an error; see `SamplingFields.name_of`.
        body_bytes: of what `read` has read.
        headers: of the answer, beside those of its content.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        self.scope = scope
        self.salt: str | None = scope["state"].get("salt")
        self.record: RequestRecord = scope["state"]["record"]
        self.name_of: Callable[[str], str | None] = _same
        self.body_bytes = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._receive = receive
        self._send = send
        self._limits = limits
        self._is_aborted = False
        self._write_began: float | None = None
        self._watch: asyncio.TimerHandle | None = None

    def header(self, name: bytes) -> bytes | None:
        """The value of a header, by its name in lower case."""
        return next((value for key, value in self.scope["headers"] if key == name), None)

    async def read(self, kind: type[T]) -> T:
        """The body as an object of a type; unknown fields are ignored.

        Raises:
            ApiError: 400, no such object; 408, it takes too long; 413, it is too large; 415, it is no JSON.
            DisconnectedError: the client has gone.
        """
        given = (self.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if given != JSON:
            # A web page cannot send JSON to another origin without asking, so this keeps foreign pages out.
            found = given.decode("latin-1")[:80] or "nothing"
            raise ApiError(415, f"content-type: got {found}; expected application/json. Set the header.")
        try:
            return msgspec.json.decode(await self._body(), type=kind)
        except msgspec.ValidationError as error:
            reason, _, place = str(error).partition(" - at `$")
            missing = _MISSING.search(reason)
            param = ".".join(filter(None, (place.rstrip("`").lstrip("."), missing[1] if missing else ""))) or None
            raise ApiError(400, f"{param or 'body'}: {reason}.", param=param, code="invalid_type") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            fix = "Send valid JSON in UTF-8."
            raise refused("body", got=error, expected="a JSON object", fix=fix, code="invalid_json") from None

    async def reply(self, value: object, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Send a JSON answer.

        Raises:
            DisconnectedError: the client takes nothing.
        """
        await self.send_bytes(msgspec.json.encode(value), JSON, status, headers)

    async def send_bytes(
        self, data: bytes, content_type: bytes, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        """Send a whole answer.

        Raises:
            DisconnectedError: the client takes nothing.
        """
        length = (b"content-length", str(len(data)).encode())
        await self._start(status, ((b"content-type", content_type), length, *headers))
        await self._write(data, more=False)

    async def begin_events(self) -> None:
        """Start a stream of server-sent events.

        Raises:
            DisconnectedError: the client takes nothing.
        """
        await self._start(200, ((b"content-type", EVENTS), (b"cache-control", b"no-cache")))

    async def send_events(self, data: bytes, *, more: bool = True) -> None:
        """Send events.

        Raises:
            DisconnectedError: the client takes nothing.
        """
        await self._write(data, more=more)

    async def wait_until_gone(self) -> None:
        """Return when the client has gone. The body must have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _body(self) -> bytes:
        limit = self._limits.body_bytes
        announced = self.header(b"content-length")
        if announced is not None and int(announced) > limit:
            raise _too_large(limit)
        parts, size, more = [], 0, True
        try:
            async with asyncio.timeout(self._limits.body_s):
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise DisconnectedError
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise _too_large(limit)
                    more = message.get("more_body", False)
        except TimeoutError:
            limit_s = self._limits.body_s
            raise ApiError(408, f"body: got a part in {limit_s:g} s; expected all of it. Send it at once.") from None
        self.body_bytes = size
        return b"".join(parts)

    async def _start(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.headers]})

    async def _write(self, data: bytes, *, more: bool) -> None:
        loop = asyncio.get_running_loop()
        self._write_began = loop.time()
        if self._watch is None:  # one timer serves many writes: setting it costs as much as a write
            self._watch = loop.call_later(self._limits.send_s, self._check_write)
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            self._write_began = None
            if not more:
                self._watch.cancel()
        if self._is_aborted:
            raise DisconnectedError

    def _check_write(self) -> None:
        """End the connection if the client takes nothing for too long; the write that waits ends with it."""
        self._watch = None
        if self._write_began is None:
            return
        loop = asyncio.get_running_loop()
        left_s = self._write_began + self._limits.send_s - loop.time()
        if left_s > 0:
            self._watch = loop.call_later(left_s, self._check_write)
        else:
            self._is_aborted = True
            self.scope["state"]["abort"]()


def _same(field: str) -> str:
    return field


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"body: got more than {limit:,} bytes; expected at most that. Send less.", code="too_large")
