"""Weights that a session maps from files: their pages can leave this process's memory while no graph reads them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PROCESS = Path("/proc/self")
_DONTNEED = 4  # MADV_DONTNEED: pages of files are read again when they are needed


class MappedWeights:
    """The parts of this process's memory that a session maps from a folder's files; none where Linux does not tell."""

    def __init__(self) -> None:
        self._places: set[tuple[int, int]] = set()

    @classmethod
    @contextmanager
    def within(cls, folder: Path) -> Iterator[MappedWeights]:
        """What is mapped from files of the folder between the begin and the end of the block."""
        found, before = cls(), {place for place, _ in _mapped(folder, "maps")}
        yield found
        # Pages that were written to are no longer the file's.
        found._places = {place for place, own_bytes in _mapped(folder, "smaps") if own_bytes == 0} - before

    def release(self) -> None:
        """Let the system take the pages. What other sessions and processes map of the same files stays."""
        with suppress(AttributeError, OSError, TypeError):  # TypeError: Windows has no library without a name
            advise = ctypes.CDLL(None).madvise
            for start, length in self._places:
                advise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(_DONTNEED))


def _mapped(folder: Path, table: str) -> Iterator[tuple[tuple[int, int], int]]:
    """Start and length of each private mapping of a file in the folder, and its written bytes if `smaps` tells them."""
    prefix, place = f"{folder.resolve()}{os.sep}", None
    try:
        lines = (_PROCESS / table).read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        first, *rest = line.split(maxsplit=5)
        if not first.endswith(":"):
            is_ours = rest[0].endswith("p") and rest[-1].startswith(prefix)
            start, end = (int(each, 16) for each in first.split("-"))
            place = (start, end - start) if is_ours else None
            if place is not None and table == "maps":
                yield place, 0
        elif first == "Anonymous:" and place is not None:
            yield place, int(rest[0]) << 10
