"""What a command is doing, at a terminal, once that takes longer than a second."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic
from typing import Protocol, TypeVar

from edgekv.cli.output import Output
from edgekv.machine.steps import running_step

T = TypeVar("T", covariant=True)

_FIRST_S, _NEXT_S = 1.0, 0.25
_START_OF_LINE = "\r\x1b[K"


class Stream(Iterator[T], Protocol[T]):
    """What follows a prompt."""

    @property
    def prefilled_tokens(self) -> int: ...

    @property
    def prompt_tokens(self) -> int: ...


@contextmanager
def waiting(output: Output, describe: Callable[[], str | None] = running_step) -> Iterator[None]:
    """Say on a line of standard error what the block does, with its seconds; the line is gone at the end.

    Nothing is said within a second, to what is no terminal, or with `--quiet` or `--json`.

    Args:
        output: of the command.
        describe: what is being done; None for nothing to say. It is called in another thread.
    """
    if output.is_quiet or output.as_json or not sys.stderr.isatty():
        yield
        return
    has_ended, started = Event(), monotonic()

    def tell() -> None:
        wait_s, has_told = _FIRST_S, False
        while not has_ended.wait(wait_s):
            wait_s = _NEXT_S
            if what := describe():
                has_told = True
                sys.stderr.write(f"{_START_OF_LINE}[{what}, {monotonic() - started:.0f} s]")
                sys.stderr.flush()
        if has_told:
            sys.stderr.write(_START_OF_LINE)
            sys.stderr.flush()

    thread = Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def after_prefill(stream: Stream[T], output: Output) -> Iterator[T]:
    """The items of a stream; until the first one, how much of the prompt has run, or which graph is loaded."""

    def describe() -> str:
        return running_step() or f"prefill: {stream.prefilled_tokens:,} of {stream.prompt_tokens:,} tokens"

    with waiting(output, describe):
        try:
            first = next(stream)
        except StopIteration:
            return
    yield first
    yield from stream
