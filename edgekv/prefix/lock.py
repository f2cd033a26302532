"""A lock between processes, released by the system when its owner dies."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

_LONGEST_WAIT_S = 60
_POLL_S = 0.005


def _held_too_long() -> OSError:
    reason = f"another process holds its lock for {_LONGEST_WAIT_S} s: end it, or use another folder"
    return OSError(errno.EAGAIN, reason)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock on a file, which is created if missing and is never removed; waits while another process holds it.

    Raises:
        OSError: the file cannot be written, another process holds it for a minute, or the file system has no locks.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)  # releases the lock


if sys.platform == "win32":

    def _lock(descriptor: int) -> None:
        import msvcrt

        for _ in range(0, _LONGEST_WAIT_S, 10):
            try:
                msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
                return
            except OSError as error:
                if error.errno != errno.EDEADLK:  # after ten seconds of waiting
                    raise
        raise _held_too_long()

else:

    def _lock(descriptor: int) -> None:
        import fcntl

        end = monotonic() + _LONGEST_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if monotonic() > end:
                    raise _held_too_long() from None
                sleep(_POLL_S)
