"""Other processes."""

from __future__ import annotations

import os


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
