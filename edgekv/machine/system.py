"""The machine: memory, sizes as text, and files that are safe to read."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shutil
import stat
import sys
from contextlib import suppress
from fractions import Fraction
from io import BufferedReader
from pathlib import Path
from typing import Any, ClassVar

from edgekv.errors import EngineError, UsageError

MIB = 1 << 20
CACHE_VARIABLE = "EDGEKV_CACHE_DIR"
LIMIT_VARIABLE = "EDGEKV_CACHE_LIMIT"
_CACHE_LIMIT = "8GB"

# More digits than any size, fewer than Python's limit.
_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?) *([KMGT]?)(I?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_INSTRUCTIONS = ("flags", "Features")  # of x86, and of Arm
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
# A FIFO without a writer must not block `open`; Windows has neither flag nor FIFOs there, and needs O_BINARY.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


# Memory


def free_memory_bytes() -> int:
    """RAM available without swapping, in bytes: `MemAvailable` of Linux and Android, otherwise free pages.

    A control group may allow less; set sizes in bytes there.

    Raises:
        EngineError: the system reports neither, as macOS.
    """
    if os.name == "nt":
        return _free_memory_on_windows()
    available_bytes = _proc_bytes("meminfo", "MemAvailable:")
    if available_bytes is not None:
        return available_bytes
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        raise EngineError(
            "free memory",
            got=f"a system that does not report it ({sys.platform})",
            expected="/proc/meminfo or sysconf",
            fix="Give the size in bytes, such as 64MiB.",
        ) from None


def is_short_of_memory() -> bool:
    """Whether less than a quarter of the machine's RAM is available; False if the system does not report it."""
    try:
        free_bytes = free_memory_bytes()
    except EngineError:
        return False
    total_bytes = memory_bytes()
    return total_bytes is not None and free_bytes < total_bytes // 4


def instructions(cpuinfo: str) -> frozenset[str]:
    """Instruction sets of a machine's first processor, by the text of its /proc/cpuinfo, as Linux names them."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next((frozenset(value.split()) for name, _, value in lines if name.strip() in _INSTRUCTIONS), frozenset())


def memory_bytes() -> int | None:
    """RAM of the machine in bytes; None if the system does not report it."""
    if os.name == "nt":
        return int(_memory_status().total)
    if (total_bytes := _proc_bytes("meminfo", "MemTotal:")) is not None:
        return total_bytes
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of the Windows API."""

    _fields_: ClassVar = [
        ("length", ctypes.c_uint32),
        ("load_percent", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("total", "available", "page_total", "page_available")),
        *((name, ctypes.c_uint64) for name in ("virtual_total", "virtual_available", "extended")),
    ]


def _free_memory_on_windows() -> int:
    return int(_memory_status().available)


def _memory_status() -> _MemoryStatus:
    kernel: Any = ctypes.windll.kernel32  # type: ignore[attr-defined]
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if not kernel.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise EngineError(
            "free memory",
            got=f"error {kernel.GetLastError()} of Windows",
            expected="its memory status",
            fix="Give the size in bytes, such as 64MiB.",
        )
    return status


def peak_bytes(pid: int | None = None) -> int:
    """Peak RAM of a process in bytes, this process by default; 0 if the system does not report it.

    `getrusage` is no substitute: it includes the peak of the process that this one was forked from.
    """
    return _proc_bytes(f"{pid or 'self'}/status", "VmHWM:") or 0


def return_freed_memory() -> None:
    """Give memory that this process has freed back to the system, where the C library can (glibc)."""
    with suppress(AttributeError, OSError, TypeError):  # TypeError: Windows has no library without a name
        ctypes.CDLL(None).malloc_trim(0)


def _proc_bytes(name: str, field: str) -> int | None:
    try:
        lines = Path("/proc", name).read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field)), None)


# Sizes


def format_bytes(size_bytes: int) -> str:
    """A size for people: `1.25 GB`, `640.0 MB`, `12.5 kB`, `80 B` (powers of 1000)."""
    for unit, power, decimals in (("GB", 9, 2), ("MB", 6, 1), ("kB", 3, 1)):
        if size_bytes >= 10**power:
            return f"{size_bytes / 10**power:.{decimals}f} {unit}"
    return f"{size_bytes} B"


def parse_bytes(option: str, text: str) -> int:
    """A size such as `4GB` (10^9 bytes each), `512 MiB` (2^20) or `1000000`, in bytes.

    Args:
        option: for the error message.
        text: as the user wrote it.

    Raises:
        UsageError: it is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(option, got=repr(text), expected="a size, such as 4GB or 512MiB", fix="Add a unit.")
    unit: int = (1024 if match[3] else 1000) ** _POWERS[match[2].upper()]
    return int(Fraction(match[1]) * unit)


# Files


def cache_folder() -> Path:
    """Folder for data that can be recomputed: EDGEKV_CACHE_DIR, or the platform's cache folder."""
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder)
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "edgekv" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "edgekv"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgekv"


def cache_limit_bytes() -> int:
    """Bytes that graphs of the CPU may take in the cache folder: EDGEKV_CACHE_LIMIT, or 8 GB.

    Raises:
        UsageError: the variable is no size.
    """
    return parse_bytes(LIMIT_VARIABLE, os.environ.get(LIMIT_VARIABLE) or _CACHE_LIMIT)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; the caller closes it.

    A FIFO or a device would block, or never end.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, _OPEN_FLAGS)
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            raise OSError(errno.EINVAL, f"{_KINDS.get(kind, 'a special file')}, not a regular file", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_file(path: Path, limit_bytes: int) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger than `limit_bytes`.
    """
    with open_regular(path) as file:
        size_bytes, raw = os.fstat(file.fileno()).st_size, b""
        if size_bytes <= limit_bytes:
            # A read takes memory for what it may return, and a limit may be a claim; files of /proc say they are empty.
            raw = file.read(size_bytes + 1)
            while raw and len(raw) <= limit_bytes and (more := file.read(min(MIB, limit_bytes + 1 - len(raw)))):
                raw += more
    if size_bytes > limit_bytes or len(raw) > limit_bytes:
        size, limit = format_bytes(max(size_bytes, len(raw))), format_bytes(limit_bytes)
        raise OSError(errno.EFBIG, f"file of {size}, more than the limit of {limit}", str(path))
    return raw


def sha256_of(path: Path) -> str:
    """The SHA-256 of a regular file, in hexadecimal.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where hard links do not exist: Android, FAT, some network disks.

    Raises:
        OSError: the source cannot be read, or the target cannot be written.
    """
    try:
        os.link(source, target)
    except (OSError, AttributeError, NotImplementedError):
        shutil.copyfile(source, target)
