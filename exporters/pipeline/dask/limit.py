"""Time limits for calls that wait for other processes, which Dask's own have not everywhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from edgekv.errors import ServiceError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Returned(Generic[T]):
    value: T


def within(limit_s: float, who: str, call: Callable[[], T], *, fix: str) -> T:
    """Call in another thread, and wait for its end no longer than this; after that the thread is left to itself.

    Args:
        limit_s: time limit in seconds.
        who: for messages: who should answer.
        call: what to do.
        fix: for messages.

    Raises:
        ServiceError: the call has not ended in time.
        BaseException: what the call raised.
    """
    ended: SimpleQueue[_Returned[T] | BaseException] = SimpleQueue()

    def run() -> None:
        try:
            ended.put(_Returned(call()))
        except BaseException as error:  # it is raised in the waiting thread
            ended.put(error)

    threading.Thread(target=run, name=f"edgekv: {who}", daemon=True).start()
    try:
        end = ended.get(timeout=limit_s)
    except Empty:
        raise ServiceError(who, got=f"no answer within {limit_s:g} s", expected="an answer", fix=fix) from None
    if isinstance(end, BaseException):
        raise end
    return end.value
