"""Threads that share an engine take turns, a step each."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from edgekv.engine import Engine, Event, GenerationStats, Request, Scores, Sequence
from edgekv.errors import UsageError
from edgekv.text import StopReason, Token, ToolCall

if TYPE_CHECKING:
    from typing import Self

    from edgekv.pictures import Picture

_POLL_S = 0.5
"""A thread that died without closing its generation notifies nobody."""


class Driver:
    """The only lock of an engine: one step at a time, and one call at a time for each cache.

    As a context manager it is the lock of a step. It is not reentrant. The garbage collector may end a call in the
    middle of a step of the same thread, so such an end is deferred to the end of the step.

    Attributes:
        engine: what is driven; set by its owner.
        is_closed: whether the model is closed.
    """

    engine: Engine

    def __init__(self) -> None:
        self.is_closed = False
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._threads: dict[Sequence, threading.Thread] = {}  # of the last step of each call
        self._deferred: deque[Callable[[], None]] = deque()

    def __enter__(self) -> Self:
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

    def start(self, request: Request) -> Sequence:
        """Begin a request once its cache is free: an earlier call of this thread or of a finished one is displaced.

        Raises:
            UsageError: the model was closed.
            EdgeKVError: see `Engine.start`.
        """
        with self:
            self.check_open()
            if not isinstance(request.cache, str):
                self._wait_for(request.cache)
            sequence = self.engine.start(request)
            self._threads[sequence] = threading.current_thread()
            return sequence

    def advance(self, sequence: Sequence) -> Event | None:
        """The next event of a call, which continues in this thread; None if it has ended.

        Raises:
            UsageError: the model was closed.
            ValueError: a later call has its cache.
            EdgeKVError: see `Sequence.advance`.
        """
        with self:
            if not self.claims(sequence):
                return None
            try:
                return sequence.advance()
            finally:
                if sequence.has_ended:
                    self.forget(sequence)

    def prefill(self, sequence: Sequence, most: int) -> bool:
        """See `Sequence.prefill`; False also for a call that has ended, or has a token.

        Raises:
            EdgeKVError: as `advance`.
            ValueError: as `advance`.
        """
        with self:
            if not self.claims(sequence) or sequence.tokens[sequence.prompt_tokens :]:
                return False
            try:
                return sequence.prefill(most)
            finally:
                if sequence.has_ended:
                    self.forget(sequence)

    def run_together(self, sequences: list[Sequence]) -> None:
        """See `Engine.run_together`.

        Raises:
            ValueError: a later call has the cache of one.
        """
        with self:
            self.check_open()
            for each in sequences:
                self.claims(each)
            self.engine.run_together(sequences)

    def end(self, sequence: Sequence) -> None:
        """End a call. Nothing happens if it has ended."""
        with self:
            self._abort(sequence)

    def drop(self, sequence: Sequence) -> None:
        """End a call from anywhere: the garbage collector may call this while the lock is held."""
        self.defer(lambda: self._abort(sequence))

    def close(self) -> None:
        """End all calls and refuse later ones."""
        with self:
            if self.is_closed:
                return
            self.is_closed = True
            self.engine.close()
            self._threads.clear()
            self._freed.notify_all()

    def check_open(self) -> None:
        """Raise UsageError if the model was closed."""
        if self.is_closed:
            raise UsageError("model", got="a closed model", expected="an open one", fix="Load the bundle again.")

    def _wait_for(self, cache: int | None) -> None:
        while (held := self.engine.holder(cache)) is not None:
            thread = self._threads.get(held)
            if thread is None or thread is threading.current_thread() or not thread.is_alive():
                return
            self._freed.wait(_POLL_S)
            self.check_open()

    def claims(self, sequence: Sequence) -> bool:
        """Continue a call in this thread; False if it has ended. The caller has the lock.

        Raises:
            UsageError: the model was closed.
            ValueError: a later call has its cache.
        """
        if not sequence.has_ended:
            self._threads[sequence] = threading.current_thread()
            return True
        if sequence.is_displaced or (self.is_closed and sequence.stop_reason is None):
            self.check_open()
            raise ValueError("generation: its cache is used by a later call of the model; finish one before the next")
        return False

    def _abort(self, sequence: Sequence) -> None:
        try:
            if not self.is_closed:
                self.engine.abort(sequence)
        finally:
            self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """A call has ended; the caller has the lock."""
        self._threads.pop(sequence, None)
        self._freed.notify_all()


class Generation(Iterator[Token]):
    """A stream of tokens. The prompt is run when the first token is requested.

    It owns its cache until it ends, is closed (`close`, or a `with` block), or is dropped; then the computed rows are
    stored in the prefix cache, even if it was interrupted.

    Attributes:
        sequence: what the engine runs.
    """

    def __init__(self, driver: Driver, request: Request) -> None:
        """Begin a request that samples; this may wait for other threads.

        Raises:
            EdgeKVError: see `Driver.start`.
        """
        self.sequence = driver.start(request)
        self._driver = driver
        self._drop = finalize(self, driver.drop, self.sequence)

    def __next__(self) -> Token:
        """The next token.

        Raises:
            StopIteration: the generation has ended or was closed; `stats.stop_reason` says why.
            ValueError: a later call in the same thread has claimed its cache.
            UsageError: the model was closed, or a logits processor left nothing to choose from.
            EngineError: the runtime failed.
        """
        driver, sequence = self._driver, self.sequence
        with driver:
            if not driver.claims(sequence):
                raise StopIteration
            try:
                token = sequence.advance()
            finally:
                if sequence.has_ended:
                    driver.forget(sequence)
        assert isinstance(token, Token), "it samples"
        return token

    def prefill(self, most: int) -> bool:
        """Run the next `most` tokens of the prompt if more are left, so that other calls can have a step in between.

        `next` runs the rest. If `most` is the largest AR of the bundle, the steps are those of a prefill at once.

        Returns:
            Whether more than `most` tokens are left.

        Raises:
            EdgeKVError: as `next`.
        """
        return self._driver.prefill(self.sequence, most)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the generation here and store the computed rows in the prefix cache. Closing twice is harmless."""
        self._drop.detach()
        self._driver.end(self.sequence)

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the prompt."""
        return self.sequence.request.tokens

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The pictures of the prompt."""
        return self.sequence.request.pictures

    @property
    def stop_reason(self) -> StopReason | None:
        """Why it ended; None while it runs or if it was interrupted."""
        return self.sequence.stop_reason

    @property
    def is_whole_text(self) -> bool:
        """Whether the text given so far is that of all tokens generated.

        Not if one of them ends a text, if a stop text was found, if it was cut within a character, or if text is
        withheld that may become either.
        """
        output = self.sequence.output
        return output is not None and output.stream.is_whole

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools so far."""
        output = self.sequence.output
        return () if output is None else output.stream.tool_calls

    @property
    def stats(self) -> GenerationStats:
        """Statistics so far."""
        return self.sequence.stats


class Scoring(Iterator[NDArray[np.float32]]):
    """Logits `[rows, V]` of the next tokens, teacher forced; other calls of the model can have a step in between.

    It owns the model's own cache until it ends, is closed or is dropped.
    """

    def __init__(self, driver: Driver, request: Request) -> None:
        """Begin a request that scores; this may wait for other threads.

        Raises:
            EdgeKVError: see `Driver.start`.
        """
        self._sequence = driver.start(request)
        self._driver = driver
        self._drop = finalize(self, driver.drop, self._sequence)

    def __next__(self) -> NDArray[np.float32]:
        """The logits of the next step; first those of the sink, if there is one.

        Raises:
            StopIteration: all tokens have been scored, or it was closed.
            ValueError: a later call in the same thread has claimed the cache.
            ContextFullError: the context has no room.
            EngineError: the runtime failed.
        """
        scores = self._driver.advance(self._sequence)
        if not isinstance(scores, Scores):
            raise StopIteration
        return scores.rows

    def close(self) -> None:
        """End here and free the cache. Closing twice is harmless."""
        self._drop.detach()
        self._driver.end(self._sequence)
