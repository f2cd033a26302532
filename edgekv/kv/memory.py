"""The bytes of a cache: plain memory, or pages that are mapped twice."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import EngineError, UsageError

ALIGNMENT_BYTES = 64
_LARGE_BYTES = 1 << 20

_FIX = "Choose the update strategy pointer-shift or slot, which need plain memory only."
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE if hasattr(mmap, "PROT_READ") else 0
_PROT_NONE, _MAP_FIXED = 0, 0x10  # Linux, every architecture that Python runs on
_FAILED = ctypes.c_void_p(-1).value


class Memory(Protocol):
    """Bytes, all 0 at first, that live as long as `buffer` or an array on it is referenced.

    Attributes:
        address: the first byte, a multiple of 64.
        offset: offset of `address` in `buffer`.
        buffer: the bytes.
        held_bytes: physical memory in use, once all pages are written.
    """

    address: int
    offset: int
    buffer: Any
    held_bytes: int


Allocate = Callable[[int], Memory]
"""Allocates this many bytes; callers ask for up to 64 more than they need, to align their arrays."""


class HeapMemory:
    """Plain memory that starts on a 64-byte boundary; see `Memory`. The system provides a page when it is written."""

    def __init__(self, size_bytes: int) -> None:
        """Allocate `size_bytes`, up to 64 of which are lost to alignment."""
        # Arrays of numpy's own ask for pages of 2 MB: a first row would bring all others.
        memory = np.zeros(size_bytes, np.uint8) if size_bytes < _LARGE_BYTES else _pages(size_bytes)
        self.buffer: Any = memory
        self.offset = -memory.ctypes.data % ALIGNMENT_BYTES
        self.address = memory.ctypes.data + self.offset
        self.held_bytes = memory.nbytes


class MirrorMemory:
    """Rings of whole pages, each mapped twice back to back; see `Memory`.

    Ring i starts at byte i * (2 * ring_bytes + beside_bytes); its second half maps the same memory as the first, and
    the bytes beside it are mapped once. All rings are in one anonymous file and one reserved address range; both are
    freed with the last array on them.
    """

    def __init__(self, rings: int, ring_bytes: int, beside_bytes: int = 0) -> None:
        """Map `rings` rings of `ring_bytes`, each with `beside_bytes` of plain memory behind it.

        Raises:
            UsageError: this system has no anonymous files (memfd_create); Linux and Android have.
            EngineError: the system refuses: no memory, or more mappings than it allows a process.
            ValueError: a ring, or what is beside it, is not a whole number of pages.
        """
        if ring_bytes < 1 or ring_bytes % mmap.PAGESIZE or beside_bytes % mmap.PAGESIZE:
            got = f"{ring_bytes} and {beside_bytes}"
            raise ValueError(f"ring_bytes, beside_bytes: got {got}; expected multiples of {mmap.PAGESIZE}, the page")
        if not hasattr(os, "memfd_create"):
            raise UsageError(
                "update strategy mirror",
                got="a system without memfd_create",
                expected="Linux or Android",
                fix=_FIX,
            )
        size_bytes = rings * (2 * ring_bytes + beside_bytes)
        try:
            self.address = _map_twice(rings, ring_bytes, beside_bytes)
        except OSError as error:
            raise EngineError(
                "update strategy mirror",
                got=f"{error.strerror} for {rings} rings of {ring_bytes} bytes",
                expected="memory that can be mapped twice (see the system's vm.max_map_count)",
                fix=_FIX,
            ) from None
        self.offset = 0
        self.buffer: Any = (ctypes.c_uint8 * size_bytes).from_address(self.address)
        self.held_bytes = rings * (ring_bytes + beside_bytes)
        release = weakref.finalize(self.buffer, _libc().munmap, self.address, size_bytes)
        release.atexit = False  # arrays may outlive it there


def aligned_zeros(shape: Sequence[int], dtype: str) -> NDArray[Any]:
    """An array of zeros, aligned to 64 bytes, which every runtime accepts."""
    memory = HeapMemory(math.prod(shape) * np.dtype(dtype).itemsize + ALIGNMENT_BYTES)
    aligned: NDArray[Any] = np.ndarray(tuple(shape), dtype, memory.buffer, memory.offset)
    return aligned


def _pages(size_bytes: int) -> NDArray[np.uint8]:
    private = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}  # none on Windows
    return np.frombuffer(mmap.mmap(-1, size_bytes, **private), np.uint8)


def aligned(size_bytes: int) -> int:
    """Rounded up to whole boundaries."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _map_twice(rings: int, ring_bytes: int, beside_bytes: int) -> int:
    """The first address of the range. If OSError is raised, nothing stays mapped."""
    held_bytes = ring_bytes + beside_bytes
    size_bytes = rings * (ring_bytes + held_bytes)
    file = os.memfd_create("edgekv-mirror")
    try:
        os.truncate(file, rings * held_bytes)
        # Reserved as one piece first: no other mapping can get between the halves of a ring.
        base = _mmap(None, size_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        try:
            for ring in range(rings):
                at, held = base + ring * (ring_bytes + held_bytes), ring * held_bytes
                # The second mapping goes on to what is beside the ring.
                for first, size in ((at, ring_bytes), (at + ring_bytes, held_bytes)):
                    _mmap(first, size, _READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, file, held)
        except OSError:
            _libc().munmap(base, size_bytes)
            raise
    finally:
        os.close(file)
    return base


def _mmap(address: int | None, size_bytes: int, protection: int, flags: int, file: int, offset: int) -> int:
    first: int = _libc().mmap(address, size_bytes, protection, flags, file, offset)
    if first == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return first


@cache
def _libc() -> Any:
    # Python's own mmap can neither reserve a range nor map to a given address.
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.restype = ctypes.c_int
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library
