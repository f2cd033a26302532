"""Progress of long operations."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from edgekv.machine.steps import LOG

if TYPE_CHECKING:
    from rich.progress import TaskID


_ALL_TENTHS = 10


class Progress(Protocol):
    """Called for every step of every stage, before the first one too, so that a stage has its name while it runs."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` steps of `stage` are finished."""


def silent(stage: str, done: int, total: int) -> None:
    """No-op callback."""


@contextmanager
def one_step(stage: str, progress: Progress) -> Iterator[None]:
    """A stage without steps of its own, for the time of the block."""
    progress(stage, 0, 1)
    yield
    progress(stage, 1, 1)


@contextmanager
def progress_bars(is_quiet: bool = False) -> Iterator[Progress]:
    """Progress bars on standard error, one per stage; lines if it is no terminal; none with `--quiet`."""
    if not is_quiet and not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console  # slow to import; --help shows no bars
    from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bars, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(file=sys.stderr), disable=is_quiet) as bars:
        tasks: dict[str, TaskID] = {}
        started: dict[str, float] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                started[stage] = perf_counter()
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done)
            if done == total and stage in started:
                LOG.info("%s: %.2f s", stage, perf_counter() - started.pop(stage))

        yield show


class _Lines:
    """A line for each stage, and for each tenth of a long one, for logs."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._told: dict[str, int] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        started = self._started.setdefault(stage, perf_counter())
        tenths = 10 * done // max(total, 1)
        if done < total and self._told.get(stage, -1) >= tenths:
            return
        if done == total and self._told.get(stage) == _ALL_TENTHS:
            return
        self._told[stage] = tenths
        seconds = perf_counter() - started
        spent = f", {seconds:.0f} s" if done else ""
        print(f"{stage}: {done} of {total}{spent}", file=sys.stderr, flush=True)
        if done == total:
            LOG.info("%s: %.2f s", stage, seconds)
