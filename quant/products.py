"""Linear algebra whose bits do not depend on the number of BLAS threads.

BLAS divides a product among its threads, and its kernels sum the elements at the edges of a part in another order. So
here BLAS has one thread, and work is divided into the same parts whatever the number of threads that do it. BLAS's own
threads also spin between products, which takes the processor from others.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

Floats = NDArray[np.float32]

T = TypeVar("T")
R = TypeVar("R")

_COLUMNS_AT_ONCE = 256
_FEWEST_PARALLEL = 1 << 24  # multiplications; below them threads gain nothing


class _Blas:
    """The thread limit of BLAS in this process, which several threads may want at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._limit: Any = None
        self._pool: tuple[int, ThreadPoolExecutor] | None = None
        self._own = threading.local()

    @cached_property
    def _controller(self) -> ThreadpoolController:
        from threadpoolctl import ThreadpoolController  # of the extra `export`: to run a bundle, none is needed

        return ThreadpoolController()

    @cached_property
    def threads(self) -> int:
        """That BLAS would take."""
        threads: list[int] = [library["num_threads"] for library in self._controller.select(user_api="blas").info()]
        return max(threads, default=1)

    @property
    def workers(self) -> ThreadPoolExecutor:
        """As many threads, which stay: a layer has hundreds of products. A fork has its own."""
        with self._lock:
            if self._pool is None or self._pool[0] != os.getpid():
                self._pool = (
                    os.getpid(),
                    ThreadPoolExecutor(self.threads, thread_name_prefix="edgekv-product", initializer=self._begin),
                )
            return self._pool[1]

    @property
    def divides(self) -> bool:
        """Whether work is divided among threads: a part of some work is not divided again."""
        return self.threads > 1 and not getattr(self._own, "is_worker", False)

    def _begin(self) -> None:
        self._own.is_worker = True

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Give BLAS one thread, until the last that wants it is done."""
        with self._lock:
            if not self._wanted:
                _ = self.threads
                self._limit = self._controller.limit(limits=1, user_api="blas")
                self._limit.__enter__()
            self._wanted += 1
        try:
            yield
        finally:
            with self._lock:
                self._wanted -= 1
                if not self._wanted:
                    self._limit.__exit__(None, None, None)


_BLAS = _Blas()
one_thread = _BLAS.one_thread


def product(left: Floats, right: Floats) -> Floats:
    """`left @ right`, `[n, m]`, with each element summed in one order, however many threads BLAS has.

    Args:
        left: `[n, k]`.
        right: `[k, m]`.
    """
    result = np.empty((len(left), right.shape[1]), np.result_type(left, right))
    parts = [slice(start, start + _COLUMNS_AT_ONCE) for start in range(0, right.shape[1], _COLUMNS_AT_ONCE)]

    def part(columns: slice) -> None:
        np.matmul(left, right[:, columns], out=result[:, columns])

    with one_thread():
        if not _BLAS.divides or result.size * len(right) < _FEWEST_PARALLEL:
            for columns in parts:
                part(columns)
        else:
            list(_BLAS.workers.map(part, parts))
    return result


def in_threads(function: Callable[[T], R], items: Sequence[T], *, at_once: int | None = None) -> Iterator[R]:
    """The results of a function for each item, in order, each computed by one thread whose BLAS has one, too.

    Args:
        function: is called by several threads at a time.
        items: what it is called with.
        at_once: maximum number of items in work and of results that nobody has taken; None for no limit.

    Raises:
        Exception: raised by the function, for the first item for which it does; no further one is begun.
    """
    with one_thread():
        if not _BLAS.divides or len(items) < 2:
            yield from map(function, items)
            return
        waiting, running = deque(items), deque[Future[R]]()
        try:
            while waiting or running:
                while waiting and len(running) < (at_once or len(items)):
                    running.append(_BLAS.workers.submit(function, waiting.popleft()))
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()
            wait(running)
