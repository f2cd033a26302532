"""Temporary folders. Leftovers of killed processes are removed by the next process that needs one."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from edgekv.system import is_alive

_LEFTOVER = re.compile(r"edgekv-[a-z]+-(\d+)-\w+")


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A new empty folder in the temporary directory, `edgekv-PURPOSE-PID-RANDOM`, removed when the block ends.

    Args:
        purpose: one lower-case word.

    Raises:
        OSError: the temporary directory cannot be written.
    """
    _clean(tempfile.gettempdir())
    prefix = f"edgekv-{purpose}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@cache  # once per process
def _clean(temporary: str) -> None:
    """Remove this user's folders whose process has ended."""
    for path in Path(temporary).glob("edgekv-*"):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or int(match[1]) == os.getpid() or is_alive(int(match[1])):
            continue
        with suppress(OSError):
            if not hasattr(os, "getuid") or path.lstat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)
