"""Work of requests off the event loop: a few threads for each kind, in which clients take turns."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from edgekv.serve.errors import queue_full, stopping
from edgekv.text.constraint import MOST_COMPILING

T = TypeVar("T")


class Job:
    """What a request has done off the event loop.

    Attributes:
        client: takes turns with others.
        deadline: when the request must have been answered, in seconds of `perf_counter`.
    """

    def __init__(self, client: str, deadline: float) -> None:
        self.client = client
        self.deadline = deadline
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._stops: list[Callable[[], None]] = []

    def check(self) -> None:
        """Go on only if somebody still waits for the answer; from any thread.

        Raises:
            Exception: that of `end`.
        """
        if self._error is not None:
            raise self._error

    def end(self, error: Exception) -> None:
        """Nobody waits for it any more: what is queued is never begun, and what runs is stopped where it can be."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            stops, self._stops = self._stops, []
        for stop in stops:
            stop()

    @contextmanager
    def stopped_by(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call a function, from any thread, if the job ends before the block does, or has ended."""
        with self._lock:
            has_ended = self._error is not None
            if not has_ended:
                self._stops.append(stop)
        if has_ended:
            stop()
        try:
            yield
        finally:
            with self._lock, suppress(ValueError):
                self._stops.remove(stop)


@dataclass(slots=True, eq=False)
class _Item:
    """A piece of work, and who waits for it."""

    job: Job
    work: Callable[[Job], Any]
    result: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class Lane:
    """Threads for one kind of work. Clients take turns: what one of them asks for is done in order.

    All but the threads' own loop is called in the event loop's thread. The threads do not keep the process from ending.
    """

    def __init__(self, name: str, threads: int, most_waiting: int) -> None:
        """Start no thread yet.

        Args:
            name: of the threads.
            threads: at most.
            most_waiting: pieces of work of a client that may wait.
        """
        self._name = name
        self._most = self._free = threads
        self._started = 0
        self._most_waiting = most_waiting
        self._queues: OrderedDict[str, deque[_Item]] = OrderedDict()  # whose turn it is first
        self._given: SimpleQueue[_Item] = SimpleQueue()
        self._jobs: set[Job] = set()
        self._is_closed = False

    @property
    def waiting(self) -> int:
        """Pieces of work that wait for a thread."""
        return sum(map(len, self._queues.values()))

    async def run(self, job: Job, work: Callable[[Job], T]) -> T:
        """The result of work, once a thread has done it.

        Args:
            job: that it is a part of.
            work: gets the job.

        Raises:
            ApiError: 429, too much of this client waits; 503, the server is stopping.
            Exception: as the work; or that of `Job.end`, at once.
        """
        if self._is_closed:
            raise stopping()
        job.check()
        queue = self._queues.setdefault(job.client, deque())
        if len(queue) >= self._most_waiting:
            raise queue_full(len(queue), after_s=1)
        loop = asyncio.get_running_loop()
        item = _Item(job, work, loop.create_future(), loop)
        queue.append(item)
        self._jobs.add(job)
        self._begin()

        def leave() -> None:  # in any thread
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._leave, item)

        try:
            with job.stopped_by(leave):
                result: T = await item.result
                return result
        finally:
            self._jobs.discard(job)

    def close(self) -> None:
        """End all work."""
        self._is_closed = True
        for job in [*self._jobs]:
            job.end(stopping())

    def _begin(self) -> None:
        while self._free and self._queues:
            client, queue = self._queues.popitem(last=False)
            item = queue.popleft()
            if queue:
                self._queues[client] = queue  # behind all others
            self._free -= 1
            if self._started < self._most - self._free:
                threading.Thread(target=self._work, name=f"edgekv {self._name}", daemon=True).start()
                self._started += 1
            self._given.put(item)

    def _leave(self, item: _Item) -> None:
        if (queue := self._queues.get(item.job.client)) is not None and item in queue:
            queue.remove(item)
            if not queue:
                del self._queues[item.job.client]
        if not item.result.done():
            try:
                item.job.check()
            except Exception as error:
                item.result.set_exception(error)

    def _work(self) -> None:
        while True:
            item = self._given.get()
            result, failure = None, None
            try:
                item.job.check()
                result = item.work(item.job)
            except BaseException as error:  # panics of Rust libraries are no Exception
                failure = error
            try:
                item.loop.call_soon_threadsafe(self._end, item, result, failure)
            except RuntimeError:  # the loop is closed: the server has ended
                return
            del item, result, failure  # what it holds is freed now, not with the next piece

    def _end(self, item: _Item, result: Any, failure: BaseException | None) -> None:
        self._free += 1
        if not item.result.done():
            if failure is None:
                item.result.set_result(result)
            else:
                item.result.set_exception(_shown(failure))
        self._begin()


def _shown(failure: BaseException) -> Exception:
    """An error that a coroutine can raise: the event loop would end with others."""
    return failure if isinstance(failure, Exception) else RuntimeError(repr(failure))


@dataclass(slots=True)
class Lanes:
    """The kinds of work. None of them waits for another.

    Attributes:
        texts: JSON, templates and tokens.
        pictures: their decoding, in child processes of which each takes up to 1 GiB.
        grammars: their compilation. Who waits for one of the `MOST_COMPILING` has a thread here too.
    """

    texts: Lane
    pictures: Lane
    grammars: Lane

    @classmethod
    def within(cls, most_waiting: int) -> Lanes:
        """With so many pieces of work of a client and of each kind that may wait."""
        sizes = {"texts": 4, "pictures": 2, "grammars": 2 * MOST_COMPILING}
        return cls(**{name: Lane(name, threads, most_waiting) for name, threads in sizes.items()})

    @property
    def waiting(self) -> int:
        """Pieces of work that wait for a thread."""
        return self.texts.waiting + self.pictures.waiting + self.grammars.waiting

    def close(self) -> None:
        """End all work."""
        for lane in (self.texts, self.pictures, self.grammars):
            lane.close()
