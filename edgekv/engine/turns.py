"""Threads that use one model take turns."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edgekv.errors import UsageError

_POLL_S = 0.5
"""A thread that died without closing its generation notifies nobody."""


def _do_nothing() -> None:
    """A no-op call."""


class Turns:
    """One step at a time, and one call at a time for each sequence.

    As a context manager it is the lock of a step. It is not reentrant. The garbage collector may request work in the
    middle of a step of the same thread, so such work is deferred to the end of the step.

    Attributes:
        is_closed: whether the model is closed.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._holds: dict[int | None, tuple[Hold, threading.Thread]] = {}
        self._deferred: deque[Callable[[], None]] = deque()

    def __enter__(self) -> Turns:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        while True:
            try:
                while self._deferred:
                    self._deferred.popleft()()
            finally:  # an interruption of such work must not keep the lock: what is left is done at the next step's end
                self._lock.release()
            # Work deferred in the meantime could not get the lock.
            if not self._deferred or not self._lock.acquire(blocking=False):
                return

    def defer(self, work: Callable[[], None]) -> None:
        """Do some work under the lock: now if it is free, otherwise after the current step."""
        self._deferred.append(work)
        if self._lock.acquire(blocking=False):
            self.__exit__()

    def claim(self, sequence: int | None, hold: Hold) -> None:
        """Claim a sequence for a call; the caller has the lock.

        Abandons an earlier call of the same thread or of a finished thread; waits for a call of another thread.
        """
        me = threading.current_thread()
        while (held := self._holds.get(sequence)) is not None:
            earlier, thread = held
            if thread is me or not thread.is_alive():
                del self._holds[sequence]
                earlier.abandon()
            else:
                self._freed.wait(_POLL_S)
                self.check_open()
        self._holds[sequence] = (hold, me)

    def keep(self, sequence: int | None, hold: Hold) -> None:
        """The call continues in this thread."""
        if self._has(sequence, hold):
            self._holds[sequence] = (hold, threading.current_thread())

    def free(self, sequence: int | None, hold: Hold) -> None:
        """The call has ended."""
        if self._has(sequence, hold):
            del self._holds[sequence]
            self._freed.notify_all()

    @contextmanager
    def whole_call(self, sequence: int | None, finish: Callable[[], None] = _do_nothing) -> Iterator[None]:
        """Hold a sequence and the lock for a whole call."""
        with self:
            hold = Hold(self, sequence, finish)
            hold.claim()
            try:
                yield
            finally:
                hold.end()

    def close(self) -> None:
        """End all running calls and refuse later ones."""
        with self:
            self.is_closed = True
            holds, self._holds = self._holds, {}
            for hold, _ in holds.values():
                hold.abandon()
            self._freed.notify_all()

    def check_open(self) -> None:
        """Raise UsageError if the model was closed."""
        if self.is_closed:
            raise UsageError("model", got="a closed model", expected="an open one", fix="Load the bundle again.")

    def _has(self, sequence: int | None, hold: Hold) -> bool:
        held = self._holds.get(sequence)
        return held is not None and held[0] is hold


class Hold:
    """A call's claim on its sequence. It outlives the caller's object, which may be dropped at any time."""

    def __init__(self, turns: Turns, sequence: int | None, finish: Callable[[], None]) -> None:
        """Claim nothing yet; `finish` is called at least once when the call ends in any way."""
        self.is_abandoned = False
        self._turns = turns
        self._sequence = sequence
        self._finish = finish

    def claim(self) -> None:
        """Claim the sequence; the caller has the lock."""
        self._turns.claim(self._sequence, self)

    def check(self, call: str) -> None:
        """Check that no later call has claimed the sequence; the caller has the lock.

        Raises:
            UsageError: the model was closed.
            ValueError: a later call has it.
        """
        if self.is_abandoned:
            self._turns.check_open()
            raise ValueError(f"{call}: its cache is used by a later call of the model; finish one before the next")

    def keep(self) -> None:
        """Continue in this thread; the caller has the lock."""
        self._turns.keep(self._sequence, self)

    def abandon(self) -> None:
        """Leave the sequence to a later call, which has the lock."""
        self.is_abandoned = True
        self._finish()

    def end(self) -> None:
        """Finish and free the sequence; the caller has the lock."""
        try:
            self._finish()
        finally:
            self._turns.free(self._sequence, self)

    def drop(self) -> None:
        """End the call from anywhere: the garbage collector may call this while the lock is held."""
        self._turns.defer(self.end)
