"""A model, the thread of its engine and an HTTP server as one thing."""

from __future__ import annotations

import socket

from edgekv.errors import EngineError
from edgekv.model import Model
from edgekv.serve.app import make_app
from edgekv.serve.options import ServeOptions
from edgekv.serve.server import HttpServer, address_of, open_socket
from edgekv.serve.service import Service

_IDLE_S = 1.0
"""The server has waited for the engine's step; what is left of its thread takes no time."""


class StuckEngineError(EngineError):
    """The engine's thread does not end."""


class Serving:
    """A model on a socket. The model stays open when it ends.

    Attributes:
        url: where it listens.
        page_url: of the chat page, for a browser on this machine.
        service: what it shares among requests.
    """

    def __init__(self, model: Model, options: ServeOptions) -> None:
        """Listen; requests are answered once `run` is called.

        Raises:
            UsageError: the address cannot be used, or the model cannot run several answers in one pass.
            EngineError: the engine refused a graph.
        """
        model.prepare()
        if options.batches:
            _ = model.batch
        self._socket: socket.socket = open_socket(options)
        self.url = address_of(self._socket)
        self.page_url = self.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:") + "/"
        self.service = Service(model, options)
        self._server = HttpServer(make_app(self.service, options), options.limits, self.service.engine)

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
