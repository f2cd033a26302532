"""HTTP: a connection and its time limits, the checks in front of every path, and a request with its answer.

An answer is a record, or server-sent events, as the HTML standard defines them.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from hashlib import sha256
from time import perf_counter
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.middleware.cors import CORSMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from edgekv.machine.decoding import DECODERS
from edgekv.serve.errors import LEFT, ApiError, DisconnectedError, api_error, refused, timed_out
from edgekv.serve.metrics import Metrics
from edgekv.serve.options import LOOPBACK, Limits, ServeOptions

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Handler = Callable[["Exchange"], Awaitable[None]]
"""Answers a request of one path."""
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
OPEN = ("/", "/health")
"""Paths that need no key."""
POLLED = ("/health", "/metrics")
"""Paths that programs ask for every few seconds: only their failures are logged."""
_SPARE = 16
"""Connections above the limit: those that ask for `POLLED` are answered, the others told that there are too many."""
_FIRST_LOOK_S = 0.01
_LOOK_S = 1.0
_OTHER = "other"
_MAX_PIPELINED = 8
"""Requests of a connection that wait for the answer to an earlier one."""
_LONG_HEADERS = "Too long headers."
_NO_REQUEST = "Invalid HTTP request."
_WHOLE_URL = re.compile(rb"https?://([^/?]*)(.*)", re.IGNORECASE | re.DOTALL)
_NAME = "NAME"
"""The end of a path that stands for any name."""

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class RequestRecord:
    """What the log says of a request.

    Attributes:
        status: of HTTP; `LEFT` before an answer has begun.
        error: code of the error that it was answered with; None if there was none.
        prompt_tokens: each prompt once; None if it never got to the model.
        cached_tokens: those of them that were not computed; None before the answer has ended.
        generated_tokens: of all answers.
        first_token_s: from the request to its first token; None before that.
        has_left: whether the client went before the end of the answer.
        began: in seconds of `perf_counter`.
    """

    status: int = LEFT
    error: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int = 0
    first_token_s: float | None = None
    has_left: bool = False
    began: float = field(default_factory=perf_counter)

    @property
    def has_begun(self) -> bool:
        """Whether an answer has begun."""
        return self.status != LEFT

    def count_token(self) -> None:
        """Count a generated token."""
        self.generated_tokens += 1
        if self.first_token_s is None:
            self.first_token_s = perf_counter() - self.began

    def line(self, method: str, path: str) -> str:
        """The line, without the time of day."""
        parts = [f"{method} {path} {self.status}"]
        if self.has_left or not self.has_begun:
            parts.append("client left")
        if self.error is not None:
            parts.append(self.error)
        if self.prompt_tokens is not None:
            cached = "" if self.cached_tokens is None else f" ({self.cached_tokens} cached)"
            parts.append(f"{self.prompt_tokens} tokens in{cached}")
            parts.append(f"{self.generated_tokens} out")
        if self.first_token_s is not None:
            parts.append(f"first token {self.first_token_s * 1e3:.0f} ms")
        parts.append(f"total {(perf_counter() - self.began) * 1e3:.0f} ms")
        return ", ".join(parts)


def event(record: msgspec.Struct, name: str | None = None) -> bytes:
    """A server-sent event whose data is a record as JSON, which has no line break outside of its texts' escapes."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + _encode(record) + b"\n\n"


class Bodies:
    """How large bodies may be: each, and those above `Limits.body_bytes` together. In the loop's thread.

    Attributes:
        max_bytes: of one.
    """

    def __init__(self, limits: Limits, *, has_pictures: bool) -> None:
        """Args: limits: of the server. has_pictures: whether its model reads pictures."""
        self.max_bytes = max(limits.picture_body_bytes if has_pictures else 0, limits.body_bytes)
        self._plain_bytes = limits.body_bytes
        self._left_bytes = limits.large_bytes

    def grow(self, held: int, size: int) -> int:
        """The bytes that a body of so many holds, of which it held some before.

        Raises:
            ApiError: 413, it is too large; 503, others are.
        """
        if size > self.max_bytes:
            raise _too_large(self.max_bytes)
        if size <= self._plain_bytes:
            return held
        if size - held > self._left_bytes:
            message = "body: got one too large beside those of other requests; expected a smaller one. Try again later."
            raise ApiError(503, message, code="busy", retry_after_s=1)
        self._left_bytes -= size - held
        return size

    def free(self, held: int) -> None:
        """Take back what a body held."""
        self._left_bytes += held


class Exchange:
    """A request and its answer on a socket: reads the one within the limits, and writes the other.

    It ends once: with its answer, when the client leaves, at its deadline, or with the server. All that it costs
    elsewhere, in whatever thread, is ended with it.

    Attributes:
        scope: of ASGI.
        name: at the end of the path, if the path has one.
        salt: of the request's API key, once that is checked; None without keys.
        cache_salt: the same, and what the request itself adds to it: nothing computed is shared between others.
        record: what the log will say of it.
        name_of: the request's name of a field in an error; see `SamplingFields.name_of`.
        headers: of the answer, beside those of its content.
        connection: takes parts of a stream that has begun past ASGI, which costs more than all else here.
        cycle: uvicorn's own record of the request.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits, bodies: Bodies) -> None:
        self.scope = scope
        self.name = ""
        self.salt: str | None = None
        self.cache_salt: str | None = None
        self.record: RequestRecord = scope["state"]["record"]
        self.name_of: Callable[[str], str | None] = _same
        self.headers: list[tuple[bytes, bytes]] = []
        self.connection: Connection = scope["state"]["connection"]
        self.cycle: RequestResponseCycle = scope["state"]["cycle"]
        self._receive = receive
        self._send = send
        self._limits = limits
        self._bodies = bodies
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._error: ApiError | None = None
        self._stops: list[Callable[[ApiError], object]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_aborted = False
        self._write_began: float | None = None
        self._watch: asyncio.TimerHandle | None = None

    @property
    def client(self) -> str:
        """Who takes turns with other clients: a key, or an address."""
        return self.salt or (self.scope["client"] or ("",))[0]

    def watch(self) -> None:
        """End it when the client leaves, or at its deadline. The body has been read; in the loop's thread."""
        connection = self.connection
        connection.on_lost = self._leave
        connection.flow.resume_reading()  # uvicorn pauses it at a long body, and would not see the client leave
        limit_s = self._limits.request_s
        left_s = self.record.began + limit_s - perf_counter()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), lambda: self.end(timed_out(limit_s)))
        if connection.is_lost:
            self._leave()

    def check(self) -> None:
        """Go on only if somebody still waits for the answer; from any thread.

        Raises:
            ApiError: 503, the server is stopping; 504, it takes too long.
            DisconnectedError: the client has gone.
        """
        if self._error is not None:
            raise self._error

    def end(self, error: ApiError) -> None:
        """Nobody waits for it any more: what is queued is never begun, and what runs is stopped where it can be."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            stops, self._stops = self._stops, []
        for stop in stops:
            stop(error)

    @contextmanager
    def stopped_by(self, stop: Callable[[ApiError], object]) -> Iterator[None]:
        """Call a function with the error, if the request ends before the block does, or has ended; from any thread."""
        with self._lock:
            if (error := self._error) is None:
                self._stops.append(stop)
        if error is not None:
            stop(error)
        try:
            yield
        finally:
            with self._lock, suppress(ValueError):
                self._stops.remove(stop)

    def close(self) -> None:
        """Watch for nothing and hold nothing any more, in the loop's thread."""
        self._bodies.free(self._held_bytes)
        self._held_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self.connection.on_lost = None

    def _leave(self) -> None:
        self.end(DisconnectedError())

    def header(self, name: bytes) -> bytes | None:
        """The value of a header, by its name in lower case."""
        return next((value for key, value in self.scope["headers"] if key == name), None)

    async def body(self) -> bytes:
        """The body, which says that it is JSON.

        Raises:
            ApiError: 408, it takes too long; 413, it is too large; 415, it is no JSON.
            DisconnectedError: the client has gone.
        """
        content_type = (self.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if content_type != JSON:
            # A web page cannot send JSON to another origin without asking, so this keeps foreign pages out.
            got = content_type.decode("latin-1")[:80] or "nothing"
            raise ApiError(415, f"content-type: got {got}; expected application/json. Set the header.")
        body = await self._body()
        self.watch()
        return body

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

    async def begin_events(self, data: bytes) -> None:
        """Start a stream of server-sent events with the first of them, if there are any.

        Raises:
            DisconnectedError: the client takes nothing.
        """
        if self.scope["http_version"] == "1.0":  # it knows no chunks: the stream ends with the connection
            self.cycle.chunked_encoding = False
        await self._start(200, ((b"content-type", EVENTS), (b"cache-control", b"no-cache")))
        if data:
            await self._write(data, more=True)

    async def send_events(self, data: bytes, *, more: bool = True) -> None:
        """Send events.

        Raises:
            DisconnectedError: the client takes nothing.
        """
        await self._write(data, more=more)

    async def _body(self) -> bytes:
        announced = self.header(b"content-length")
        if announced is not None:
            self._held_bytes = self._bodies.grow(0, int(announced))
        parts, size, more = [], 0, True
        try:
            # A timer for the rest of a body that has arrived would cost as much as reading it.
            async with asyncio.timeout(self._limits.body_s if self.cycle.more_body else None):
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise DisconnectedError()
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._held_bytes = self._bodies.grow(self._held_bytes, max(size, self._held_bytes))
                    more = message.get("more_body", False)
        except TimeoutError:
            limit_s = self._limits.body_s
            raise ApiError(408, f"body: got a part in {limit_s:g} s; expected all of it. Send it at once.") from None
        return b"".join(parts)

    async def _start(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.headers]})

    def send_part(self, data: bytes) -> None:
        """Send a part of a stream that has begun, if its connection `has_room`."""
        self.connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self.cycle.chunked_encoding else data)

    async def _write(self, data: bytes, *, more: bool) -> None:
        if not self.cycle.chunked_encoding:  # uvicorn counts what was announced, and a stream announces nothing
            self.cycle.expected_content_length = len(data)
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
            raise DisconnectedError()

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
            self.connection.abort()


def read_json(body: bytes, kind: type[T]) -> T:
    """A body as an object of a type; unknown fields are ignored.

    Raises:
        ApiError: no such object.
    """
    try:
        return DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        missing = _MISSING.search(reason)
        param = ".".join(filter(None, (place.rstrip("`").lstrip("."), missing[1] if missing else ""))) or None
        raise ApiError(400, f"{param or 'body'}: {reason}.", param=param, code="invalid_type") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fix = "Send valid JSON in UTF-8."
        raise refused("body", got=error, expected="a JSON object", fix=fix, code="invalid_json") from None


class ApiKeys:
    """The accepted keys. Only their hashes are kept."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @property
    def are_required(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._digests)

    def salt(self, authorization: bytes | None) -> str | None:
        """The cache salt of a request's key; None if the key is not accepted.

        Every key is compared, each in constant time, so that the time tells nothing.

        Args:
            authorization: the header's value, `Bearer KEY`; None if there is none.
        """
        scheme, _, key = (authorization or b"").partition(b" ")
        key_digest = _digest(key.strip() if scheme.lower() == b"bearer" else b"")
        matches = [hmac.compare_digest(key_digest, digest) for digest in self._digests]
        return sha256(b"edgekv cache salt" + key_digest).hexdigest() if any(matches) else None


class Routes:
    """The handlers of paths, by method. A path may end with `NAME`, which stands for any name."""

    def __init__(self, handlers: Sequence[tuple[str, str, Handler]]) -> None:
        """Each with its method and path."""
        self._paths: dict[str, dict[str, Handler]] = {}
        self._named: dict[str, dict[str, Handler]] = {}  # by what is before the name
        for method, path, handler in handlers:
            start = path.removesuffix(_NAME)
            paths = self._paths if start == path else self._named
            paths.setdefault(start, {})[method] = handler
        self._shown = ", ".join(dict.fromkeys(path for _, path, _ in handlers))

    def __contains__(self, path: str) -> bool:
        """Whether this is a path without a name."""
        return path in self._paths

    def find(self, method: str, path: str) -> tuple[Handler, str]:
        """The handler of a request, and the name in its path; HEAD is answered as GET.

        Raises:
            ApiError: 404, no such path; 405, it has other methods.
        """
        methods, name = self._paths.get(path), ""
        if methods is None:
            start = next((prefix for prefix in self._named if path.startswith(prefix) and path != prefix), None)
            if start is None:
                message = f"path: got {path[:200]!r}; expected one of {self._shown}. Correct it."
                raise ApiError(404, message, code="not_found")
            methods, name = self._named[start], path.removeprefix(start)
        handler = methods.get("GET" if method == "HEAD" else method)
        if handler is None:
            allowed = sorted(methods)
            message = f"method: got {method} {path[:200]!r}; expected {' or '.join(allowed)}. Use it."
            raise ApiError(405, message, code="wrong_method", allowed=allowed)
        return handler, name


class Guard:
    """Checks the host and the API key, counts and logs answers, and turns exceptions into errors of the API.

    Pages of the allowed origins can read errors too.
    """

    def __init__(self, routes: Routes, options: ServeOptions, metrics: Metrics, bodies: Bodies) -> None:
        self._routes = routes
        self._bodies = bodies
        self._options = options
        self._is_local = options.is_local
        self._keys = ApiKeys(options.keys)
        self._metrics = metrics
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
        path = scope["path"] if scope["path"] in self._routes else _OTHER
        record = scope["state"]["record"] = RequestRecord()

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                self._metrics.count_answer(path, record.status)
                message["headers"].append((b"date", _date(int(time.time()))))
            await send(message)

        try:
            await self._answer(scope, receive, counted)
        finally:
            is_poll = scope["path"] in POLLED and record.status == 200
            if self._options.logs_requests and not is_poll:
                write_line(record.line(scope["method"], scope["raw_path"][:200].decode("ascii", "backslashreplace")))

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._options.limits, self._bodies)
        try:
            self._check(exchange)
            if scope["path"] not in POLLED and scope["state"]["connection"].is_crowded:
                max_connections, fix = self._options.limits.connections, "Try again later."
                message = f"connections: got more than {max_connections} requests at once; expected at most that. {fix}"
                raise ApiError(503, message, code="busy", retry_after_s=1)
            handler, exchange.name = self._routes.find(scope["method"], scope["path"])
            await handler(exchange)
        except DisconnectedError:
            self._metrics.disconnects += 1
            exchange.record.has_left = True
        except Exception as error:
            told = api_error(error).renamed(exchange.name_of)
            exchange.record.error = told.code or told.body.error.type
            if exchange.record.has_begun:  # the status is out: all that is left is to end the connection
                raise
            await exchange.reply(told.body, told.status, told.headers)
        finally:
            exchange.close()

    def _check(self, exchange: Exchange) -> None:
        """Refuse foreign hosts and requests without a key.

        Raises:
            ApiError: 403, another host than this machine; 401, no accepted key.
        """
        scope = exchange.scope
        if self._is_local:
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
            exchange.salt = exchange.cache_salt = salt


class Connection(HttpToolsProtocol):
    """HTTP/1.1 on a connection, which is closed if headers take too long, or if others need its place while it is idle.

    A client that sends no more may have left, or wait for its answer: an interim response tells, as the system of a
    client that has left refuses it.

    Attributes:
        limits: of headers and times, and of connections.
        idle: the connections of the server that wait for a request, the longest first.
        is_lost: whether it has ended.
        on_lost: called when it ends; None if nobody has to know.
    """

    limits: ClassVar[Limits]
    idle: ClassVar[dict[Connection, None]]
    is_lost = False
    on_lost: Callable[[], None] | None = None
    _header_bytes = 0  # of the request that arrives
    _unparsed_bytes = 0  # at least so many since the last part of it
    _has_head = False
    _deadline: asyncio.TimerHandle | None = None
    _look: asyncio.TimerHandle | None = None
    _sends_no_more = False

    @classmethod
    def within(cls, limits: Limits) -> type[Connection]:
        """The same with limits, for a server: uvicorn makes the connections."""
        return type(cls.__name__, (cls,), {"limits": limits, "idle": {}})

    @property
    def is_crowded(self) -> bool:
        """Whether more requests than allowed are being answered, this one included."""
        return len(self.tasks) > self.limits.connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "connection": self}
        self._deadline = self.loop.call_later(self.limits.header_s, transport.abort)
        if len(self.connections) > self.limits.connections and self.idle:
            longest = next(iter(self.idle))
            del self.idle[longest]
            longest.transport.close()
        elif len(self.connections) > self.limits.connections + _SPARE:
            transport.abort()
        self.idle[self] = None

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        self._unparsed_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            try:
                self.parser.feed_data(data)
            except HttpParserUpgrade as upgrade:
                self._read_on(data[upgrade.args[0] :])
        except HttpParserError:
            self.send_400_response(_NO_REQUEST)
        if self._unparsed_bytes > self.limits.header_bytes and not self.transport.is_closing():
            self.send_400_response(_LONG_HEADERS)
        if self.cycle is not before:
            self._disarm()
            self.idle.pop(self, None)
        elif self._deadline is None and (before is None or before.response_complete):
            self._deadline = self.loop.call_later(self.limits.header_s, self.abort)

    def send_400_response(self, msg: str) -> None:
        if self._is_answering and (self.pipeline or self.cycle.response_started):
            self.abort()  # it would be read as a part of the answer
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        self._header_bytes, self._has_head = 0, False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > self.limits.header_bytes:
            raise ValueError(_LONG_HEADERS)
        if not self._has_head:  # those behind a body say nothing that is read
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError("too many requests before an answer")
        self._unparsed_bytes, self._has_head = 0, True
        self._use_origin_form()
        super().on_headers_complete()
        self.scope["state"]["cycle"] = self.cycle

    def _read_on(self, rest: bytes) -> None:
        """Read the body of a request that offers another protocol, such as HTTP/2: the parser takes it for that one's.

        The connection ends with the answer.
        """
        framing = (b"content-length", b"transfer-encoding")
        fields = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] in framing)
        body = SimpleNamespace(on_body=self.on_body, on_message_complete=self.on_message_complete)
        self.parser = HttpRequestParser(body)
        self.cycle.keep_alive = False
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n%b" % (fields, rest))

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # it has seen the head alone
            return
        self._unparsed_bytes = 0
        super().on_message_complete()

    def _use_origin_form(self) -> None:
        """Read a request target that is a whole URL, as sent to proxies: its host counts, not that of the header.

        RFC 9112, section 3.2.2.
        """
        if (whole := _WHOLE_URL.fullmatch(self.url)) is not None:
            others = [header for header in self.headers if header[0] != b"host"]
            self.headers[:] = [(b"host", whole[1]), *others]
            self.url = whole[2]
        if not self.url.startswith(b"/"):
            self.url = b"/" + self.url

    def eof_received(self) -> bool:  # type: ignore[override]
        self._sends_no_more = self._is_answering and not self.cycle.more_body
        if self._sends_no_more:
            self._probe()
        return self._sends_no_more

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_answering:  # the next request had come already
            return
        if self._sends_no_more:
            self.transport.close()
        else:
            self.idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._look is not None:
            self._look.cancel()
        self.idle.pop(self, None)
        super().connection_lost(exc)
        self.is_lost = True
        if self.on_lost is not None:
            self.on_lost()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _probe(self) -> None:
        """Send what a client that has left refuses; clients of HTTP/1.0 do not know it."""
        is_alone = not self.pipeline  # otherwise an earlier one is being answered
        if is_alone and not self.cycle.response_started and self.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        self._look_for_refusal(_FIRST_LOOK_S)

    def _look_for_refusal(self, after_s: float) -> None:
        """End the connection once the client's system has refused what was sent: asyncio no longer looks."""
        client = self.transport.get_extra_info("socket")
        if self.transport.is_closing() or client is None:
            return
        if client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.abort()
        else:
            self._look = self.loop.call_later(after_s, self._look_for_refusal, min(2 * after_s, _LOOK_S))

    @property
    def has_room(self) -> bool:
        """Whether it takes a part without waiting: it is open, and the client has not too much unread."""
        return not (self.flow.write_paused or self.transport.is_closing())

    def abort(self) -> None:
        """End it at once."""
        self.transport.abort()

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def write_line(line: str) -> None:
    """Write a line with the time of day. A standard error that nobody reads any more is no reason to fail."""
    with suppress(OSError, ValueError):
        print(time.strftime("%Y-%m-%d %H:%M:%S"), line, file=sys.stderr, flush=True)


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    """A time since 1970 as headers have it: writing one takes as long as all else of a head."""
    return formatdate(second, usegmt=True).encode()


def _same(field: str) -> str:
    return field


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"body: got more than {limit:,} bytes; expected at most that. Send less.", code="too_large")


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
