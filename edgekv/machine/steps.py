"""Steps that take a while: records of the logger `edgekv`, at the level INFO, which `--verbose` prints."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

LOG = logging.getLogger("edgekv")

_running: list[str] = []


@contextmanager
def step(what: str) -> Iterator[None]:
    """Log what a block does, with its seconds, at its end."""
    started = perf_counter()
    _running.append(what)
    try:
        yield
    finally:
        _running.remove(what)
    LOG.info("%s: %.2f s", what, perf_counter() - started)


def running_step() -> str | None:
    """What the process does now, for another thread that tells it; None outside of steps."""
    return _running[-1] if _running else None
