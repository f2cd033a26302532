"""Several child processes at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from edgekv.errors import EngineError
from edgekv.plan import COMPILE_BYTES
from edgekv.system import free_memory_bytes
from exporters.progress import Progress

T = TypeVar("T")


def compiler_processes() -> int:
    """Compilers to run at a time: one per core, limited by free RAM."""
    try:
        fitting = free_memory_bytes() // COMPILE_BYTES
    except EngineError:  # the system does not report it
        fitting = 1
    return max(1, min(os.cpu_count() or 1, fitting))


def side_by_side(work: Sequence[Callable[[], T]], processes: int, stage: str, progress: Progress) -> Iterator[T]:
    """Run pieces of work concurrently and yield their results in order.

    Args:
        work: callables that each wait for a child process.
        processes: the most that run at a time.
        stage: name of the stage for `progress`.
        progress: called after each piece.

    Raises:
        Exception: raised by a piece; pieces that have not started are cancelled.
    """
    progress(stage, 0, len(work))
    with ThreadPoolExecutor(processes) as pool:
        pieces = [pool.submit(piece) for piece in work]
        try:
            for done, piece in enumerate(pieces, start=1):
                yield piece.result()
                progress(stage, done, len(work))
        finally:
            for piece in pieces:
                piece.cancel()
