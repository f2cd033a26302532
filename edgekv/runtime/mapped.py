"""Weights that a session maps from files: their pages can leave this process's memory while no graph reads them."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

_PROCESS = Path("/proc/self")
_ENTRY = np.dtype(np.uint64)  # of `pagemap`, one for each page
_DONTNEED = 4  # MADV_DONTNEED: pages of files are read again when they are needed


class MappedWeights:
    """The parts of this process's memory that a session maps from a folder's files; none where Linux does not tell."""

    def __init__(self) -> None:
        self._places: dict[str, list[tuple[int, int]]] = {}

    @classmethod
    @contextmanager
    def within(cls, folder: Path) -> Iterator[MappedWeights]:
        """What is mapped from files of the folder between the begin and the end of the block."""
        weights, before = cls(), _mapped(folder)
        yield weights
        # Pages that were written to are no longer the file's.
        for name, start, length in _mapped(folder) - before:
            if _is_as_in_file(start, length):
                weights._places.setdefault(name, []).append((start, length))

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
    prefix, mapped = os.fsencode(f"{folder.resolve()}{os.sep}"), set()
    with suppress(OSError):
        for line in (_PROCESS / "maps").read_bytes().splitlines():
            if prefix in line:
                span, rights, *_, path = line.split(maxsplit=5)
                if rights.endswith(b"p") and path.startswith(prefix):
                    start, end = (int(address, 16) for address in span.split(b"-"))
                    mapped.add((os.fsdecode(path.removeprefix(prefix)), start, end - start))
    return mapped


def _is_as_in_file(start: int, length: int) -> bool:
    """Whether no page of a mapping was written to; False if the system does not tell.

    `smaps` tells as well, but walks the pages of all mappings of the process. Bits of a page's entry: 63 present, 62
    swapped, 61 of a file (https://docs.kernel.org/admin-guide/mm/pagemap.html).
    """
    with suppress(OSError), (_PROCESS / "pagemap").open("rb", buffering=0) as table:
        table.seek(start // mmap.PAGESIZE * _ENTRY.itemsize)
        entries = np.frombuffer(table.read(length // mmap.PAGESIZE * _ENTRY.itemsize), _ENTRY)
        is_own = (entries >> 62 != 0) & (entries >> 61 & 1 == 0)
        return entries.size == length // mmap.PAGESIZE and not is_own.any()
    return False
