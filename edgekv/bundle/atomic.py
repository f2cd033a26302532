"""Files and folders that appear complete or not at all."""

from __future__ import annotations

import errno
import glob
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgekv.bundle.manifest import MANIFEST
from edgekv.errors import BundleError, UsageError
from edgekv.system import is_alive

_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)
_in_use: set[Path] = set()


@contextmanager
def atomic_file(target: Path, *, flush: bool = False) -> Iterator[Path]:
    """A temporary path beside `target`, renamed to `target` when the block ends without an exception.

    The file is `.NAME.partial-PID-THREAD`; on an exception it is removed. Leftovers of a killed process are removed by
    the next one with the same target.

    Args:
        target: the file; replaced if it exists.
        flush: write it to the disk before it is renamed.

    Raises:
        OSError: the folder cannot be written.
    """
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}-{threading.get_ident()}")
    for path in target.parent.glob(f"{glob.escape(f'.{target.name}.partial-')}*-*"):
        owner = path.name.removeprefix(f".{target.name}.partial-").partition("-")[0]
        if owner.isdecimal() and not is_alive(int(owner)):
            with suppress(OSError):
                path.unlink()
    try:
        yield partial
        if flush:
            _flush(partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_directory(target: str | Path, *, force: bool = False, marker: str = MANIFEST) -> Iterator[Path]:
    """A new empty folder beside `target`, renamed to `target` when the block ends without an exception.

    The folder is `.NAME.partial-PID`. On success its files are flushed to disk before it is renamed; on an
    exception it is removed. Leftovers of a killed process are removed by the next one with the same target.

    Args:
        target: the folder to create, with its parents.
        force: replace an existing folder, once the new one is complete.
        marker: `force` replaces only an empty folder or one with a file of this name, so that a mistyped path does not
            delete a home directory.

    Raises:
        UsageError: `target` exists and `force` is not given, or `target` must not be replaced.
        BundleError: the parent folder cannot be written.
    """
    target = Path(target).absolute()
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    if partial in _in_use:
        raise ValueError(f"target: {target} is being written by this process already")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _clean(target)
        check_output(target, force=force, marker=marker)
        partial.mkdir()
    except OSError as error:
        fix = "Give a path in a folder that you can write."
        raise BundleError(f"output {target}", got=error.strerror, expected="a writable folder", fix=fix) from None
    _in_use.add(partial)
    try:
        yield partial
        _flush_tree(partial)
        _swap(partial, target, force=force, marker=marker)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        _in_use.discard(partial)


def remove_directory(target: Path) -> None:
    """Remove a folder that `atomic_directory` has made; other processes see it whole or not at all."""
    gone = target.with_name(f".{target.name}.partial-{os.getpid()}")
    with suppress(OSError):  # there is none
        target.replace(gone)
    shutil.rmtree(gone, ignore_errors=True)


def check_output(target: Path, *, force: bool, marker: str = MANIFEST) -> None:
    """Raise the errors of `atomic_directory` before any work is done.

    Raises:
        UsageError: see `atomic_directory`.
    """
    try:
        status = target.lstat()
    except OSError:
        return
    field = f"output {target}"
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(field, got="a file", expected="a path that does not exist", fix="Give another path.")
    if not force:
        fix = "Give another path, or --force to replace it."
        raise UsageError(field, got="an existing folder", expected="a path that does not exist", fix=fix)
    try:
        names = {path.name for path in target.iterdir()}
        is_same = target.lstat().st_ino == status.st_ino
    except FileNotFoundError:
        is_same = False
    if not is_same:  # another process has moved it away while its files were listed
        check_output(target, force=force, marker=marker)
    elif names and marker not in names:
        fix = "Give another path, or remove the folder yourself."
        raise UsageError(field, got=f"a folder without {marker}", expected=f"one that has {marker}", fix=fix)


def replaced_by_a_killed_process(target: Path) -> Path | None:
    """The folder that holds what was at `target` until a process that replaced it was killed; None if none was.

    The next `atomic_directory` with this target restores it.
    """
    try:
        found = [path for path, kind in _leftovers(target) if kind == "old"]
    except OSError:
        return None
    return found[0] if found and not os.path.lexists(target) else None


def _swap(partial: Path, target: Path, *, force: bool, marker: str) -> None:
    """Rename a folder, in place of an existing one. If several processes replace it at once, the last one wins."""
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    while True:
        check_output(target, force=force, marker=marker)
        with suppress(FileNotFoundError):  # there is none, or another process has moved it away
            target.replace(old)
        try:
            partial.replace(target)
        except BaseException as error:
            # Another process has put one there meanwhile, and may have moved it away again.
            if isinstance(error, OSError) and (error.errno in _OCCUPIED or target.exists()):
                shutil.rmtree(old, ignore_errors=True)
                continue
            if old.exists():
                old.replace(target)
            raise
        _flush(target.parent)
        shutil.rmtree(old, ignore_errors=True)
        return


def _clean(target: Path) -> None:
    """Remove leftovers of dead processes, and restore a target that one of them was replacing when it died."""
    for path, kind in _leftovers(target):
        if kind == "old" and not target.exists():
            with suppress(FileNotFoundError):  # another process restores it too
                path.replace(target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _leftovers(target: Path) -> Iterator[tuple[Path, str]]:
    """Folders beside a target that dead processes have left, and whether they are `partial` or `old`."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(partial|old)-(\d+)")
    for path in [*target.parent.iterdir()] if target.parent.is_dir() else []:
        match = pattern.fullmatch(path.name)
        if match is not None and path not in _in_use and not is_alive(int(match[2])):
            yield path, match[1]


def _flush_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            _flush(Path(parent) / name)
        _flush(Path(parent))


def _flush(path: Path) -> None:
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


def _on_windows() -> bool:
    return os.name == "nt"
