"""Temporary folders, and files that appear complete or not at all. What killed processes left is removed by the next.

A temporary folder has a lock, which its process holds and the kernel releases when the process ends. A process id would
say nothing: in another container it belongs to another process, or to none.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

NEW, OLD = "new", "old"
_LOCK = ".lock"
_NAME = re.compile(r".+-(?P<system>[0-9a-f]{8})-[0-9a-f]{16}", re.DOTALL)
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mountinfo")
# Only one machine at a time can have mounted these. What is not named here may be shared.
_DISKS = (
    "bcachefs",
    "btrfs",
    "exfat",
    "ext2",
    "ext3",
    "ext4",
    "f2fs",
    "ntfs3",
    "overlay",
    "tmpfs",
    "vfat",
    "xfs",
    "zfs",
)
_FLAGS = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A new folder in the temporary directory, `edgekv-PURPOSE-SYSTEM-RANDOM`, removed when the block ends.

    Args:
        purpose: one lower-case word.

    Raises:
        OSError: the temporary directory cannot be written.
    """
    parent = tempfile.gettempdir()
    _clean(parent)
    with held_folder(Path(parent), f"edgekv-{purpose}", mode=0o700) as folder:
        yield folder


@contextmanager
def held_folder(parent: Path, prefix: str, *, mode: int = 0o777) -> Iterator[Path]:
    """A new folder `PREFIX-SYSTEM-RANDOM`, held by a lock in it and removed when the block ends.

    What the block leaves as `old` stays: it is what a folder replaced, and could not be put back.

    Args:
        parent: where it is made.
        prefix: of its name. SYSTEM names the running system: containers of one machine share it.
        mode: its permissions, less the process's mask.

    Raises:
        OSError: `parent` cannot be written.
    """
    folder, lock = _new_folder(parent, prefix, mode)
    try:
        yield folder
    finally:
        _remove(folder, lock, keep=OLD)


def held_folders(parent: Path, prefix: str = "") -> list[Path]:
    """The folders of `held_folder` in a folder, of living processes and of others."""
    paths = [path for path in _entries(parent) if path.name.startswith(prefix) and is_temporary(path)]
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def is_temporary(path: Path) -> bool:
    """Whether a path is named like a folder of `held_folder`."""
    return _NAME.fullmatch(path.name) is not None


def is_held(folder: Path) -> bool:
    """Whether a living process certainly holds a folder of `held_folder`; False also where locks do not work."""
    with suppress(OSError):
        lock = os.open(folder / _LOCK, _FLAGS)
        try:
            return _take(lock) is False
        finally:
            os.close(lock)
    return False


def remove_abandoned(parent: Path, prefix: str = "") -> None:
    """Remove the folders of `held_folder` whose process has certainly ended.

    One of another machine, or from before a restart, stays on a file system that machines may share: not all of these
    pass locks on.
    """
    for folder in held_folders(parent, prefix):
        _remove_if_abandoned(folder)


@contextmanager
def atomic_file(target: Path, *, flush: bool = True) -> Iterator[Path]:
    """A temporary path on the same disk, renamed to `target` when the block ends without an exception.

    It is in a folder `.NAME.partial-SYSTEM-RANDOM` beside the target, which is removed in any case.

    Args:
        target: the file; replaced if it exists.
        flush: write it to the disk before it is renamed; otherwise a power cut may leave an empty file.

    Raises:
        OSError: the folder cannot be written.
    """
    prefix = f".{target.name}.partial"
    remove_abandoned(target.parent, prefix)
    with held_folder(target.parent, prefix) as folder:
        yield folder / NEW
        if flush:
            flush_to_disk(folder / NEW)
        (folder / NEW).replace(target)
        if flush:
            flush_to_disk(target.parent)


def flush_to_disk(path: Path) -> None:
    """Flush a file or folder to disk. Windows and some file systems cannot do that with folders."""
    is_folder = path.is_dir()
    if is_folder and _on_windows():
        return
    # Windows flushes only files that are open for writing.
    descriptor = os.open(path, os.O_RDWR if _on_windows() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not is_folder or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@cache  # once per process
def _clean(temporary: str) -> None:
    """Remove this user's folders whose process has ended."""
    for folder in held_folders(Path(temporary), "edgekv-"):
        with suppress(OSError):
            if not hasattr(os, "getuid") or folder.lstat().st_uid == os.getuid():
                _remove_if_abandoned(folder)


def _new_folder(parent: Path, prefix: str, mode: int) -> tuple[Path, int]:
    """A new folder, and its lock."""
    while True:
        folder = parent / f"{prefix}-{_system()}-{secrets.token_hex(8)}"
        folder.mkdir(mode)
        with suppress(FileNotFoundError):  # another process took it for one that was left, and removed it
            lock = os.open(folder / _LOCK, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
            if _take(lock) is not False and os.path.samestat(os.fstat(lock), (folder / _LOCK).stat()):
                return folder, lock
            os.close(lock)


def _remove_if_abandoned(folder: Path) -> None:
    name = _NAME.fullmatch(folder.name)
    if name is None or (name["system"] != _system() and not _is_local(folder.parent)):
        return
    try:
        lock = os.open(folder / _LOCK, _FLAGS)
    except FileNotFoundError:
        with suppress(OSError):
            folder.rmdir()  # if it is empty; a process that was about to lock it makes another one
        return
    except OSError:
        return
    if _take(lock):
        _remove(folder, lock)
    else:
        os.close(lock)


def _take(lock: int) -> bool | None:
    """Take the lock of an open file, until the file is closed or the process ends.

    Returns:
        False if another process has it; None if the file system has no locks.
    """
    try:
        if sys.platform == "win32":
            msvcrt.locking(lock, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK) else None
    return True


def _remove(folder: Path, lock: int, keep: str = "") -> None:
    """Remove a folder whose lock is open. The lock goes last, so that what cannot be removed now is found later."""
    for path in _entries(folder):
        if path.name in (_LOCK, keep):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
    is_empty = [path.name for path in _entries(folder)] == [_LOCK]
    with suppress(OSError):
        if is_empty and not _on_windows():  # while it is held: nobody can take it for the lock of a new folder
            (folder / _LOCK).unlink()
    os.close(lock)
    with suppress(OSError):
        if is_empty and _on_windows():  # no open file can be removed there
            (folder / _LOCK).unlink()
        folder.rmdir()


def _entries(folder: Path) -> list[Path]:
    try:
        return [*folder.iterdir()]
    except OSError:  # it is gone, or cannot be read
        return []


@cache
def _system() -> str:
    """Names the running system, until it is restarted."""
    try:
        text = _BOOT.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        text = platform.node()
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _is_local(folder: Path) -> bool:
    """Whether only this machine can have mounted a folder's file system; False if that cannot be known."""
    try:
        lines = _MOUNTS.read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    place, longest, kind = folder.resolve(), 0, ""
    for line in lines:
        mount, _, source = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), mount.split(" ")[4])  # "\\040" is a space
        if place.is_relative_to(point) and len(point) >= longest:
            longest, kind = len(point), source.split(" ")[0]
    return kind in _DISKS


def _on_windows() -> bool:
    return os.name == "nt"
