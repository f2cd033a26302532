"""Weights that a session maps from files: their pages can leave this process's memory while no graph reads them."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import numpy as np

from edgekv.runtime.idle_memory import IdleMemory

_PROCESS = Path("/proc/self")
_ENTRY = np.dtype(np.uint64)  # of `pagemap`, one for each page
_DONTNEED = 4  # MADV_DONTNEED: pages of files are read again when they are needed


class MappedWeights:
    """The parts of this process's memory that a session maps from a folder's files; none where Linux does not tell."""

    def __init__(self) -> None:
        self._places: dict[str, list[tuple[int, int]]] = {}
        self._idle = IdleMemory()

    @classmethod
    @contextmanager
    def within(cls, folder: Path) -> Iterator[MappedWeights]:
        """What is mapped from files of the folder between the begin and the end of the block."""
        weights, before = cls(), _mapped(folder)
        yield weights
        with suppress(OSError), (_PROCESS / "pagemap").open("rb", buffering=0) as pages:
            for name, start, length in _mapped(folder) - before:
                if _is_as_in_file(pages, start, length):
                    weights._places.setdefault(name, []).append((start, length))

    def release_idle(self) -> None:
        """Let the system take all pages, if they are to leave; see `IdleMemory`."""
        if self._idle.leaves():
            self.release()

    def release(self, name: str | None = None) -> None:
        """Let the system take the pages, of one file or of all.

        What other sessions and processes map of the same files stays.
        """
        names = self._places if name is None else [name] if name in self._places else []
        with suppress(AttributeError, OSError, TypeError):  # TypeError: Windows has no library without a name
            advise = ctypes.CDLL(None).madvise
            for start, length in (place for name in names for place in self._places[name]):
                advise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(_DONTNEED))


def _mapped(folder: Path) -> set[tuple[str, int, int]]:
    """Name, start and length of each private mapping of a file in the folder."""
    place = re.escape(os.fsencode(f"{folder.resolve()}{os.sep}"))
    line = rb"^([0-9a-f]+)-([0-9a-f]+) ...p \S+ \S+ \S+ +" + place + rb"(.+)$"
    with suppress(OSError):
        spans = re.findall(line, (_PROCESS / "maps").read_bytes(), re.MULTILINE)
        ends = ((name, int(start, 16), int(end, 16)) for start, end, name in spans)
        return {(os.fsdecode(name), start, end - start) for name, start, end in ends}
    return set()


def _is_as_in_file(pages: FileIO, start: int, length: int) -> bool:
    """Whether no page of a mapping was written to: then it would no longer be the file's.

    `smaps` tells as well, but walks the pages of all mappings of the process. Bits of a page's entry: 63 present, 62
    swapped, 61 of a file (https://docs.kernel.org/admin-guide/mm/pagemap.html).

    Args:
        pages: `pagemap` of this process.
        start: address of the mapping.
        length: its bytes.

    Raises:
        OSError: the system does not tell.
    """
    count = length // mmap.PAGESIZE
    pages.seek(start // mmap.PAGESIZE * _ENTRY.itemsize)
    entries = np.frombuffer(pages.read(count * _ENTRY.itemsize), _ENTRY)
    is_own = (entries >> 62 != 0) & (entries >> 61 & 1 == 0)
    return entries.size == count and not is_own.any()
