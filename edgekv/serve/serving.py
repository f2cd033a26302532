"""A model, the thread of its engine and an HTTP server as one thing.

uvicorn serves, with no work while idle.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from uvicorn import Config, Server

from edgekv.errors import EngineError, UsageError
from edgekv.model import Model
from edgekv.serve.app import make_app
from edgekv.serve.errors import OUT_OF_FILES, is_out_of_files
from edgekv.serve.http import App, Connection
from edgekv.serve.options import Limits, ServeOptions
from edgekv.serve.service import Service

_KEEP_ALIVE_S = 60
_SHUTDOWN_S = 5
ENGINE_S = 30.0
"""How long the last step of the engine may take once the server is to stop."""
_POLL_S = 0.02
_SILENT_S = 60.0
_IDLE_S = 1.0
"""The server has waited for the engine's step; what is left of its thread takes no time."""


class StuckEngineError(EngineError):
    """The engine's thread does not end."""


class ModelServer:
    """A model on a socket. The model stays open when it ends.

    Attributes:
        url: where it listens.
        page_url: of the chat page, for a browser on this machine.
        service: what it shares among requests.
    """

    def __init__(self, model: Model, options: ServeOptions, listener: socket.socket | None = None) -> None:
        """Listen; requests are answered once `run` is called.

        Args:
            model: the model.
            options: of the server.
            listener: of `open_socket`, where requests may wait already; None to open one.

        Raises:
            UsageError: the address cannot be used, or the model cannot run several answers in one pass.
            EngineError: the engine refused a graph.
        """
        model.prepare()
        if options.batches:
            _ = model.batch
        self._socket: socket.socket = open_socket(options) if listener is None else listener
        self.url = address_of(self._socket)
        self.page_url = self.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:") + "/"
        self.service = Service(model, options)
        self._server = HttpServer(make_app(self.service, options), options.limits, self.service)

    def run(self) -> None:
        """Serve until a signal or `stop`; in the main thread, signals are raised again at the end.

        Raises:
            StuckEngineError: the engine is still in a step, so that the model cannot be closed.
        """
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self.service.engine.stop()
            if not self.service.engine.has_ended(_IDLE_S):
                fix = "End the process; what it has stored is whole."
                raise StuckEngineError("engine", got="a step that does not end", expected="its end", fix=fix)

    def stop(self) -> None:
        """Let `run` return soon, from any thread."""
        self._server.stop()


def open_socket(options: ServeOptions) -> socket.socket:
    """A socket that listens.

    Raises:
        UsageError: the address cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=options.limits.connections)
        # Connections inherit it; asyncio does not see that they are TCP. Without it a token waits for the client's
        # acknowledgement of the one before, which may take 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except socket.gaierror as error:
        fix = "Use 127.0.0.1 for this machine, or 0.0.0.0 for all its networks."
        raise UsageError("host", got=f"{options.host}: {error.strerror}", expected="an address", fix=fix) from None
    except OSError as error:
        place = f"{options.host}:{options.port}"
        fix = "Choose another --port, or --port 0 for a free one."
        raise UsageError("address", got=f"{place}: {error.strerror}", expected="a free one", fix=fix) from None
    return listener


def address_of(listener: socket.socket) -> str:
    """The URL of a socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(Server):
    """uvicorn's server. It sleeps until a connection or a signal wakes it, and ends the engine's thread with it."""

    def __init__(self, app: App, limits: Limits, service: Service) -> None:
        config = Config(
            app,
            http=Connection.within(limits),
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
        super().__init__(config)
        self._engine, self._work = service.engine, service.work
        self._is_impatient = False
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until it is to stop and all connections have ended."""
        with self._engine.heard_by(asyncio.get_running_loop()):
            await super().serve(sockets)

    async def main_loop(self) -> None:
        """Wait until the server is to stop; uvicorn would look ten times a second.

        Then the engine ends its step, unless that takes too long or a second signal asks for the end.
        """
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(_OpenFiles().log)
        with _woken_by_signals(self._loop):
            if not self.should_exit:
                await self._stop.wait()
        self._engine.stop()
        self._work.close()
        end = self._loop.time() + ENGINE_S
        while not (self._engine.has_ended() or self._is_impatient or self._loop.time() > end):
            await asyncio.sleep(_POLL_S)
        if not self._engine.has_ended():
            self._engine.give_up()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._is_impatient = self.should_exit
        super().handle_exit(sig, frame)
        self.stop()

    def stop(self) -> None:
        """Stop soon, from any thread."""
        self.should_exit = True
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)


@contextmanager
def _woken_by_signals(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Let a signal wake an event loop that sleeps, also if another thread gets it, or if it comes right before."""
    if threading.current_thread() is not threading.main_thread() or os.name == "nt":  # there asyncio does so itself
        yield
        return
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        loop.add_reader(reader, reader.recv, 4096)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(reader)


class _OpenFiles:
    """Says that no file can be opened any more, once a minute: the event loop tries again all the time."""

    def __init__(self) -> None:
        self._again = 0.0

    def log(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """For failures that the event loop reports."""
        if not is_out_of_files(context.get("exception")):
            # Python 3.11 tries again once for each place in the backlog, also after the socket has been closed.
            if "_start_serving" not in context["message"]:
                loop.default_exception_handler(context)
        elif loop.time() >= self._again:
            self._again = loop.time() + _SILENT_S
            print(f"edgekv serve: {OUT_OF_FILES} New connections wait.", file=sys.stderr)
