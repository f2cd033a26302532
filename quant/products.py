"""Linear algebra whose bits do not depend on the number of BLAS threads.

BLAS divides a product among its threads, and its kernels sum the elements at the edges of a part in another order. So
here BLAS has one thread, and products are divided into the same parts whatever the number of threads that compute them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

Floats = NDArray[np.float32]

_COLUMNS_AT_ONCE = 256
_FEWEST_PARALLEL = 1 << 24  # multiplications; below them threads gain nothing


class _Blas:
    """The thread limit of BLAS in this process, which several threads may want at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._limit: Any = None

    @cached_property
    def _controller(self) -> ThreadpoolController:
        from threadpoolctl import ThreadpoolController  # of the extra `export`: to run a bundle, none is needed

        return ThreadpoolController()

    @cached_property
    def threads(self) -> int:
        """That BLAS would take."""
        found: list[int] = [each["num_threads"] for each in self._controller.select(user_api="blas").info()]
        return max(found, default=1)

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
    found = np.empty((len(left), right.shape[1]), np.result_type(left, right))
    parts = [slice(start, start + _COLUMNS_AT_ONCE) for start in range(0, right.shape[1], _COLUMNS_AT_ONCE)]

    def part(columns: slice) -> None:
        found[:, columns] = left @ right[:, columns]

    with one_thread():
        if _BLAS.threads == 1 or found.size * len(right) < _FEWEST_PARALLEL:
            for columns in parts:
                part(columns)
        else:
            with ThreadPoolExecutor(_BLAS.threads) as workers:
                list(workers.map(part, parts))
    return found
