"""Threads that share an engine take turns, a step each."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar
from weakref import finalize, ref

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

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _User:
    """Who has a call: the thread of its last step, and the object that ends the call when it is dropped."""

    thread: threading.Thread
    owner: ref[object]

    @property
    def is_elsewhere(self) -> bool:
        """Whether another thread may go on with the call."""
        is_here = self.thread is threading.current_thread()
        return not is_here and self.thread.is_alive() and self.owner() is not None


class Driver:
    """The only lock of an engine: one step at a time, and one call at a time for each cache.

    The garbage collector may end a call in the middle of a step of the same thread, so such an end is deferred to the
    end of the step. Ctrl-C may come between any two lines: the lock is only ever taken by a `with` on the lock itself,
    which no signal divides, and what was deferred is removed once it is done.

    Attributes:
        engine: what is driven; set by its owner.
        is_closed: whether the model is closed.
        lock: of a step, for what needs nothing but that no step runs; not reentrant.
    """

    engine: Engine

    def __init__(self) -> None:
        self.is_closed = False
        self.lock = threading.Lock()
        self._waiting: list[SimpleQueue[None]] = []  # one for each thread that waits for a cache
        self._users: dict[Sequence, _User] = {}
        self._deferred: deque[Callable[[], None]] = deque()

    def locked(self, work: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
        """Do some work under the lock, and then what was deferred meanwhile. It is not reentrant."""
        try:
            with self.lock:
                return work(*arguments, **options)
        finally:
            self._do_deferred()

    def defer(self, work: Callable[[], None]) -> None:
        """Do some work under the lock: now if it is free, otherwise after the current step.

        Work that Ctrl-C interrupts is done again after the next step.
        """
        self._deferred.append(work)
        self._do_deferred()

    def _do_deferred(self) -> None:
        """Do what was deferred, unless a step runs: its end does it, as it looks for it without the lock."""
        while self._deferred and not self.lock.locked():
            with self.lock:
                self._do_all()

    def _do_all(self) -> None:
        while self._deferred:
            try:
                self._deferred[0]()
            except Exception:
                self._deferred.popleft()
                raise
            self._deferred.popleft()

    def start(self, request: Request, owner: object) -> Sequence:
        """Begin a request once its cache is free: an earlier call of this thread or of a finished one is displaced.

        Args:
            request: to begin.
            owner: ends it with `drop` when nothing refers to it any more.

        Raises:
            UsageError: the model was closed.
            EdgeKVError: see `Engine.start`.
        """
        freed: SimpleQueue[None] = SimpleQueue()
        while (sequence := self.locked(self._start, request, ref(owner), freed)) is None:
            with suppress(Empty):
                freed.get(timeout=_POLL_S)
        return sequence

    def _start(self, request: Request, owner: ref[object], freed: SimpleQueue[None]) -> Sequence | None:
        """Begin a request; None if a call of another thread has its cache, whose end `freed` gets."""
        self.check_open()
        if not isinstance(request.cache, str) and (held := self.engine.holder(request.cache)) is not None:
            user = self._users.get(held)
            if user is not None and user.is_elsewhere:
                if freed not in self._waiting:
                    self._waiting.append(freed)
                return None
        sequence = self.engine.start(request)
        self._users[sequence] = _User(threading.current_thread(), owner)
        return sequence

    def advance(self, sequence: Sequence) -> Event | None:
        """The next event of a call, which continues in this thread; None if it has ended.

        Raises:
            UsageError: the model was closed.
            ValueError: a later call has its cache.
            EdgeKVError: see `Sequence.advance`.
        """
        try:
            with self.lock:
                return sequence.advance() if self.claims(sequence) else None
        finally:
            self.settle(sequence)

    def settle(self, sequence: Sequence) -> None:
        """After a step, without the lock: forget a call that has ended, and do what was deferred."""
        if sequence.has_ended:
            self._deferred.append(partial(self._forget, sequence))
        self._do_deferred()

    def prefill(self, sequence: Sequence, most: int) -> bool:
        """See `Sequence.prefill`; False also for a call that has ended, or has a token.

        Raises:
            EdgeKVError: as `advance`.
            ValueError: as `advance`.
        """
        return self.locked(self._prefill, sequence, most)

    def _prefill(self, sequence: Sequence, most: int) -> bool:
        if not self.claims(sequence) or sequence.tokens[sequence.prompt_tokens :]:
            return False
        try:
            return sequence.prefill(most)
        finally:
            if sequence.has_ended:
                self._forget(sequence)

    def run_together(self, sequences: list[Sequence]) -> None:
        """See `Engine.run_together`.

        Raises:
            ValueError: a later call has the cache of one.
        """

        def run() -> None:
            self.check_open()
            for each in sequences:
                self.claims(each)
            self.engine.run_together(sequences)

        self.locked(run)

    def end(self, sequence: Sequence) -> None:
        """End a call. Nothing happens if it has ended."""
        self.locked(self._abort, sequence)

    def drop(self, request: Request) -> None:
        """End the call of a request, if there is one: the garbage collector may call this while the lock is held."""
        self.defer(lambda: self._abort_request(request))

    def free(self, cache: int) -> None:
        """Free the cache of an id, from anywhere."""
        self.defer(lambda: None if self.is_closed else self._free(cache))

    def _free(self, cache: int) -> None:
        if (held := self.engine.holder(cache)) is not None:
            self._abort(held)
        self.engine.pool.free(cache)

    def close(self) -> None:
        """End all calls and refuse later ones."""

        def close() -> None:
            if self.is_closed:
                return
            self.is_closed = True
            self.engine.close()
            self._users.clear()
            self._wake()

        self.locked(close)

    def check_open(self) -> None:
        """Raise UsageError if the model was closed."""
        if self.is_closed:
            raise UsageError("model", got="a closed model", expected="an open one", fix="Load the bundle again.")

    def claims(self, sequence: Sequence) -> bool:
        """Continue a call in this thread; False if it has ended. The caller has the lock.

        Raises:
            UsageError: the model was closed.
            ValueError: a later call has its cache.
        """
        if not sequence.has_ended:
            self._users[sequence] = replace(self._users[sequence], thread=threading.current_thread())
            return True
        if sequence.is_displaced or (self.is_closed and sequence.stop_reason is None):
            self.check_open()
            raise ValueError("generation: its cache is used by a later call of the model; finish one before the next")
        return False

    def _abort_request(self, request: Request) -> None:
        if not self.is_closed:
            for each in {*self.engine.running, *self.engine.waiting, *self._users}:
                if each.request is request:
                    self._abort(each)

    def _abort(self, sequence: Sequence) -> None:
        try:
            if not self.is_closed:
                self.engine.abort(sequence)
        finally:
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """A call has ended; the caller has the lock."""
        self._users.pop(sequence, None)
        self._wake()

    def _wake(self) -> None:
        """Let those who wait for a cache look again; the caller has the lock."""
        while self._waiting:
            self._waiting.pop().put(None)


class Call:
    """A request that runs. It owns its cache until it ends, is closed, or is dropped.

    Attributes:
        sequence: what the engine runs.
    """

    def __init__(self, driver: Driver, request: Request) -> None:
        """Begin a request; this may wait for other threads.

        Raises:
            EdgeKVError: see `Driver.start`.
        """
        self._driver = driver
        self._drop = finalize(self, driver.drop, request)  # first: what has begun is ended, whatever comes between
        self.sequence = driver.start(request, self)

    def advance(self) -> Event | None:
        """See `Driver.advance`."""
        return self._driver.advance(self.sequence)

    def close(self) -> None:
        """End it here. Closing twice is harmless."""
        self._driver.end(self.sequence)
        self._drop.detach()


class Generation(Call, Iterator[Token]):
    """A stream of tokens. The prompt is run when the first token is requested.

    It owns its cache until it ends, is closed (`close`, or a `with` block), or is dropped; then the computed rows are
    stored in the prefix cache, even if it was interrupted.

    Attributes:
        sequence: what the engine runs.
    """

    def __next__(self) -> Token:
        """The next token.

        Raises:
            StopIteration: the generation has ended or was closed; `stats.stop_reason` says why.
            ValueError: a later call in the same thread has claimed its cache.
            UsageError: the model was closed, or a logits processor left nothing to choose from.
            EngineError: the runtime failed.
        """
        driver, sequence = self._driver, self.sequence
        try:
            with driver.lock:  # as `Driver.advance`: a reader follows a token through few frames
                token = sequence.advance() if driver.claims(sequence) else None
        finally:
            driver.settle(sequence)
        if token is None:
            raise StopIteration
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
        super().close()

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


class Scoring(Call, Iterator[NDArray[np.float32]]):
    """Logits `[rows, V]` of the next tokens, teacher forced; other calls of the model can have a step in between.

    It owns the model's own cache until it ends, is closed or is dropped.
    """

    def __next__(self) -> NDArray[np.float32]:
        """The logits of the next step; first those of the sink, if there is one.

        Raises:
            StopIteration: all tokens have been scored, or it was closed.
            ValueError: a later call in the same thread has claimed the cache.
            ContextFullError: the context has no room.
            EngineError: the runtime failed.
        """
        scores = self.advance()
        if not isinstance(scores, Scores):
            raise StopIteration
        return scores.rows
