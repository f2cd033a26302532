"""Events from the engine's thread to a coroutine."""

from __future__ import annotations

import asyncio
from collections import deque

from edgekv.serve.errors import CANCELLED, ApiError, DisconnectedError
from edgekv.serve.events import Event


class Channel:
    """A queue that one thread writes and one coroutine reads. The reader is woken once for all that has arrived.

    It has the events of all answers to a request, each with the index of its answer.
    """

    def __init__(self) -> None:
        """For the running loop."""
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[int, Event]] = deque()
        self._arrived = asyncio.Event()
        self._is_woken = False

    def put(self, index: int, event: Event) -> None:
        """Add an event of an answer, from any thread. Nothing happens if the loop has ended."""
        self._events.append((index, event))
        if not self._is_woken:
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._arrived.set)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

    async def take(self, within_s: float | None = None) -> list[tuple[int, Event]]:
        """All events that have arrived, at least one; none if that takes longer than a time.

        Raises:
            DisconnectedError: the job was cancelled, as the client has gone.
        """
        timer = None if within_s is None else self._loop.call_later(within_s, self._arrived.set)
        try:
            await self._arrived.wait()
        finally:
            if timer is not None:
                timer.cancel()
        self._arrived.clear()
        self._is_woken = False  # before reading: an event that arrives now wakes the reader again
        taken = []
        while self._events:
            index, event = self._events.popleft()
            if isinstance(event, ApiError) and event.code == CANCELLED:
                raise DisconnectedError
            taken.append((index, event))
        return taken if taken or within_s is not None else await self.take()
