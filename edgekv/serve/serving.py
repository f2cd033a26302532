"""A model, its scheduler and an HTTP server as one thing."""

from __future__ import annotations

import socket

from edgekv.model import Model
from edgekv.serve.app import make_app
from edgekv.serve.options import ServeOptions
from edgekv.serve.server import HttpServer, address_of, open_socket
from edgekv.serve.service import Service


class Serving:
    """A model on a socket. The model stays open when it ends.

    Attributes:
        url: where it listens.
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
            model.prepare_together()
        self._socket: socket.socket = open_socket(options)
        self.url = address_of(self._socket)
        self.service = Service(model, options)
        self._server = HttpServer(make_app(self.service, options), options.limits)
        self._server.at_exit = self.service.scheduler.close

    def run(self) -> None:
        """Serve until a signal or `stop`; in the main thread, signals are raised again at the end."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.service.scheduler.close()
            self._socket.close()

    def stop(self) -> None:
        """Let `run` return soon, from any thread."""
        self._server.stop()
