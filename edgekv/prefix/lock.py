"""A lock between processes, released by the system when its owner dies."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock on a file, which is created if missing and is never removed; waits while another process holds it.

    Raises:
        OSError: the file cannot be written, or the file system has no locks.
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

        while True:
            try:
                msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
                return
            except OSError as error:
                if error.errno != errno.EDEADLK:  # after ten seconds of waiting
                    raise

else:

    def _lock(descriptor: int) -> None:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX)
