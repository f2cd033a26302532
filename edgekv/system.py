"""Other processes."""

from __future__ import annotations

import os
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether another process has this id; what bears our own id on the disk is an earlier process's."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def peak_bytes(pid: int | None = None) -> int:
    """RAM, the most that a process held so far, in bytes: this one, or another. 0 where Linux does not say.

    `getrusage` would count what the process held that this one was forked from.
    """
    return _bytes_in(Path(f"/proc/{pid or 'self'}/status"), "VmHWM:")


def available_bytes() -> int:
    """RAM that new work can have without swapping, in bytes; 0 where Linux does not say."""
    return _bytes_in(Path("/proc/meminfo"), "MemAvailable:")


def _bytes_in(path: Path, field: str) -> int:
    try:
        lines = path.read_text("ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field)), 0)
