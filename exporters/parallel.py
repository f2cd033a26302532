"""Work in several child processes at once."""

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
    """How many compilers may run at once: one for each core, as long as RAM is free for what each may take."""
    try:
        fitting = free_memory_bytes() // COMPILE_BYTES
    except EngineError:  # the system does not report it
        fitting = 1
    return max(1, min(os.cpu_count() or 1, fitting))


def side_by_side(work: Sequence[Callable[[], T]], processes: int, stage: str, progress: Progress) -> Iterator[T]:
    """Results in the order of the work, of which so many pieces are done at once.

    Args:
        work: pieces that each wait for a process of their own.
        processes: the most that may run at once.
        stage: told to `progress` with the pieces that are done.
        progress: told of each piece.

    Raises:
        Exception: what a piece raised; pieces that were not begun are not begun then.
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
