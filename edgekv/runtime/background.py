"""Work that is done in a thread of its own while the runtime computes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue


class Aside:
    """A piece of work under way; a few microseconds to start, where a pool's future takes tens."""

    __slots__ = ("_done", "_work", "error")

    def __init__(self, work: Callable[[], None]) -> None:
        self.error: Exception | None = None
        self._work = work
        self._done = threading.Lock()
        self._done.acquire()
        _queue().put(self)

    def wait(self) -> None:
        """Return when it is done.

        Raises:
            Exception: what the work raised.
        """
        with self._done:
            pass
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        """Do it; the thread calls this."""
        try:
            self._work()
        except Exception as error:  # whoever waits is told
            self.error = error
        del self._work
        self._done.release()


_queues: dict[int, SimpleQueue[Aside]] = {}


def _queue() -> SimpleQueue[Aside]:
    """The queue of this process's thread: a fork leaves the thread behind."""
    process = os.getpid()
    if process not in _queues:
        _queues.clear()
        _queues[process] = SimpleQueue()
        threading.Thread(target=_serve, args=(_queues[process],), name="edgekv-aside", daemon=True).start()
    return _queues[process]


def _serve(queue: SimpleQueue[Aside]) -> None:
    while True:
        queue.get().run()
