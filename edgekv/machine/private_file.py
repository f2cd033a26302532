"""Files and folders that only their owner can have written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

# Windows and some Python builds lack a few of these; there they are not needed or not possible.
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


class NotPrivateError(OSError):
    """A file or folder that another user owns or can change; `strerror` says why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(1, reason, str(path))


def check_folder(folder: Path) -> None:
    """Raise NotPrivateError if another user owns a folder, or could create or replace files in it."""
    _check(folder, folder.stat(), 0o022)


def make_folder(folder: Path) -> None:
    """Create a folder with its parents, where they are missing, that only their owner can enter (mode 0700)."""
    if not folder.parent.exists():
        make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def read_private(path: Path, limit_bytes: int, *, secret: bool = False) -> bytes:
    """The first `limit_bytes` of a regular file; if `secret`, of one that others cannot even read.

    Raises:
        NotPrivateError: a symbolic link, a special file, another user's file, or one that others may change.
        OSError: it cannot be read.
    """
    if not _FLAGS and path.is_symlink():
        raise NotPrivateError(path, "a symbolic link")
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS | _NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise NotPrivateError(path, "a symbolic link") from None
        raise error from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotPrivateError(path, "not a regular file")
        _check(path, status, 0o077 if secret else 0o022)
        return file.read(min(limit_bytes, status.st_size + 1))  # memory is taken for all that is asked for


def write_private(path: Path, data: bytes) -> None:
    """Create a file that only its owner can read (mode 0600); OSError if it exists or cannot be written."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _check(path: Path, status: os.stat_result, forbidden: int) -> None:
    if not hasattr(os, "geteuid"):
        return  # Windows uses access control lists, which files inherit from the user's folders
    if status.st_uid != os.geteuid():
        raise NotPrivateError(path, f"owned by user {status.st_uid}")
    if status.st_mode & forbidden:
        raise NotPrivateError(path, f"open to other users (mode {stat.S_IMODE(status.st_mode):o})")
