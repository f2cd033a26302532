"""Runs work in a background thread while the runtime computes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue


class BackgroundTask:
    """A task that runs in the background thread. It starts in a few microseconds; a thread pool's future needs tens."""

    __slots__ = ("_done", "_work", "error")

    def __init__(self, work: Callable[[], None]) -> None:
        """Start it."""
        self.error: Exception | None = None
        self._work = work
        self._done = threading.Lock()
        self._done.acquire()
        _queue().put(self)

    def wait(self) -> None:
        """Wait for the task to finish.

        Raises:
            Exception: what the work raised.
        """
        with self._done:
            pass
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        """Do the work; the thread calls this."""
        try:
            self._work()
        except Exception as error:  # raised again by `wait`
            self.error = error
        del self._work
        self._done.release()


_queues: dict[int, SimpleQueue[BackgroundTask]] = {}


def _queue() -> SimpleQueue[BackgroundTask]:
    """The queue of this process's thread: a fork does not copy the thread."""
    process = os.getpid()
    if process not in _queues:
        _queues.clear()
        _queues[process] = SimpleQueue()
        threading.Thread(target=_serve, args=(_queues[process],), name="edgekv-background", daemon=True).start()
    return _queues[process]


def _serve(queue: SimpleQueue[BackgroundTask]) -> None:
    while True:
        queue.get().run()
