"""Events from the engine's thread to a coroutine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from edgekv.serve.errors import CANCELLED, ApiError, DisconnectedError
from edgekv.serve.events import Event


class Channel:
    """A queue that other threads write and one coroutine reads: `put` adds events, and `wake` tells the reader.

    It has the events of all answers to a request, each with the index of its answer.
    """

    def __init__(self) -> None:
        """For the running loop."""
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[int, Event]] = deque()
        self._arrived = asyncio.Event()
        self._is_woken = self._is_late = False
        self._timer: asyncio.TimerHandle | None = None

    def put(self, index: int, event: Event) -> None:
        """Add an event of an answer, from any thread; the reader learns of it with `wake`."""
        self._events.append((index, event))

    async def take(self, within_s: float | None = None) -> list[tuple[int, Event]]:
        """All events that have arrived, at least one; or none, at least once within some seconds.

        Raises:
            DisconnectedError: the job was cancelled, as the client has gone.
        """
        if within_s is not None and self._timer is None:  # it runs on over several calls: setting it costs time
            self._timer = self._loop.call_later(within_s, self._end_wait)
        taken: list[tuple[int, Event]] = []
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            self._is_woken = False  # before reading: an event that arrives now wakes the reader again
            while self._events:
                index, event = self._events.popleft()
                if isinstance(event, ApiError) and event.code == CANCELLED:
                    raise DisconnectedError
                taken.append((index, event))
            if taken or self._is_late:
                self._is_late = False
                return taken

    def close(self) -> None:
        """Nobody reads it any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _end_wait(self) -> None:
        self._timer = None
        self._is_late = True
        self._arrived.set()

    @staticmethod
    def wake(channels: Iterable[Channel]) -> None:
        """Tell the readers of channels of one loop that events have arrived, from any thread."""
        asleep = [each for each in channels if not each._is_woken]
        for each in asleep:
            each._is_woken = True
        if asleep:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                asleep[0]._loop.call_soon_threadsafe(_set, [each._arrived for each in asleep])


def _set(arrived: Iterable[asyncio.Event]) -> None:
    for each in arrived:
        each.set()
