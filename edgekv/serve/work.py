"""Work of requests off the event loop: one queue, in which clients take turns."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from edgekv.serve.errors import ApiError, queue_full, stopping
from edgekv.serve.http import Exchange
from edgekv.text.constraint import MAX_COMPILING

T = TypeVar("T")

Kind = Literal["text", "chat", "pictures", "grammar"]
"""JSON and tokens; the same with a template, which may take seconds; the decoding of pictures; the compilation of a
grammar."""
_THREADS: Mapping[Kind, int] = MappingProxyType({"text": 4, "chat": 4, "pictures": 2, "grammar": 2 * MAX_COMPILING})
"""At most, so that no kind waits for another. A picture is decoded in a child process that takes up to 1 GiB. Who waits
for one of the `MAX_COMPILING` has a thread here too."""


@dataclass(slots=True, eq=False)
class _Item:
    """A piece of work, and who waits for it."""

    kind: Kind
    exchange: Exchange
    work: Callable[[], Any]
    result: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class WorkQueue:
    """Work that requests wait for, done by threads.

    Clients take turns, and what one of them asks for is done in order. All but the threads' own loop is called in the
    event loop's thread. The threads do not keep the process from ending.
    """

    def __init__(self, max_waiting: int, threads: Mapping[Kind, int] = _THREADS) -> None:
        """Start no thread yet.

        Args:
            max_waiting: pieces of work of a client that may wait.
            threads: of each kind of work, at most.
        """
        self._max_waiting = max_waiting
        self._threads = threads
        self._running: Counter[Kind] = Counter()
        self._started = 0
        self._queues: OrderedDict[str, deque[_Item]] = OrderedDict()  # by client; whose turn it is first
        self._begun: SimpleQueue[_Item] = SimpleQueue()
        self._exchanges: set[Exchange] = set()
        self._is_closed = False

    @property
    def waiting(self) -> int:
        """Pieces of work that wait for a thread."""
        return sum(map(len, self._queues.values()))

    @property
    def idle(self) -> bool:
        """Whether no thread works."""
        return not self._running.total()

    async def run(self, exchange: Exchange, kind: Kind, work: Callable[[], T]) -> T:
        """The result of work, once a thread has done it.

        Args:
            exchange: the request that it is done for.
            kind: of work.
            work: what is done; it calls `Exchange.check` before what takes long.

        Raises:
            ApiError: 429, too much of this client waits; 503, the server is stopping; 504, it takes too long.
            DisconnectedError: the client has gone.
            Exception: as the work.
        """
        if self._is_closed:
            raise stopping()
        exchange.check()
        loop = asyncio.get_running_loop()
        item = _Item(kind, exchange, work, loop.create_future(), loop)
        if self._running[kind] < self._threads[kind]:
            self._begin(item)
        else:
            queue = self._queues.setdefault(exchange.client, deque())
            if len(queue) >= self._max_waiting:
                raise queue_full(len(queue), after_s=1)
            queue.append(item)
        self._exchanges.add(exchange)
        try:
            with exchange.stopped_by(lambda error: self._leave(item, error)):
                result: T = await item.result
                return result
        finally:
            self._exchanges.discard(exchange)

    def close(self) -> None:
        """End all requests that work is done for."""
        self._is_closed = True
        for exchange in [*self._exchanges]:
            exchange.end(stopping())

    def _begin(self, item: _Item) -> None:
        self._running[item.kind] += 1
        if self._started < self._running.total():
            threading.Thread(target=self._work, name=f"edgekv work {self._started}", daemon=True).start()
            self._started += 1
        self._begun.put(item)

    def _begin_next(self, kind: Kind) -> None:
        """Begin the first work of a kind that waits."""
        for client, queue in self._queues.items():
            item = next((item for item in queue if item.kind == kind), None)
            if item is not None:
                self._queues.move_to_end(client)
                self._remove(item)
                self._begin(item)
                return

    def _remove(self, item: _Item) -> None:
        client = item.exchange.client
        if (queue := self._queues.get(client)) is not None and item in queue:
            queue.remove(item)
            if not queue:
                del self._queues[client]

    def _leave(self, item: _Item, error: ApiError) -> None:
        self._remove(item)
        if not item.result.done():
            item.result.set_exception(error)

    def _work(self) -> None:
        while True:
            item = self._begun.get()
            result, failure = None, None
            try:
                item.exchange.check()
                result = item.work()
            except BaseException as error:  # panics of Rust libraries are no Exception
                failure = error
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                item.loop.call_soon_threadsafe(self._end, item, result, failure)
            del item, result, failure  # what it holds is freed now, not with the next piece

    def _end(self, item: _Item, result: Any, failure: BaseException | None) -> None:
        self._running[item.kind] -= 1
        if not item.result.done():
            if failure is None:
                item.result.set_result(result)
            else:
                item.result.set_exception(_shown(failure))
        self._begin_next(item.kind)


def _shown(failure: BaseException) -> Exception:
    """An error that a coroutine can raise: the event loop would end with others."""
    return failure if isinstance(failure, Exception) else RuntimeError(repr(failure))
