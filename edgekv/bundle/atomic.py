"""Folders that appear complete or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from edgekv.bundle.manifest import MANIFEST
from edgekv.errors import BundleError, UsageError
from edgekv.machine.scratch import NEW, OLD, flush_to_disk, held_folder, held_folders, is_held, remove_abandoned

_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)
_in_use: set[Path] = set()


@contextmanager
def atomic_directory(target: str | Path, *, force: bool = False, marker: str = MANIFEST) -> Iterator[Path]:
    """A new empty folder on the same disk, renamed to `target` when the block ends without an exception.

    It is in a folder `.NAME.partial-SYSTEM-RANDOM` beside the target, which is removed in any case; see `held_folder`.
    On success its files are flushed to disk before it is renamed. Leftovers of a killed process are removed by the next
    one with the same target.

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
    if target in _in_use:
        raise ValueError(f"target: {target} is being written by this process already")
    with ExitStack() as resources:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _clean(target)
            check_output(target, force=force, marker=marker)
            held = resources.enter_context(held_folder(target.parent, _prefix(target)))
            (held / NEW).mkdir()
        except OSError as error:
            raise _not_writable(target, error) from None
        _in_use.add(target)
        resources.callback(_in_use.discard, target)
        yield held / NEW
        _flush_tree(held / NEW)
        _swap(held, target, force=force, marker=marker)


def remove_directory(target: Path) -> None:
    """Remove a folder that `atomic_directory` has made; other processes see it whole or not at all."""
    with suppress(OSError), held_folder(target.parent, _prefix(target)) as held:  # there may be none
        target.replace(held / "removed")


def check_new(target: Path, *, force: bool, marker: str = MANIFEST) -> None:
    """Raise the errors of `atomic_directory` before any work is done.

    Raises:
        UsageError: see `atomic_directory`.
        BundleError: its parent, or the nearest folder above it that exists, cannot be written.
    """
    check_output(target, force=force, marker=marker)
    parent = next(path for path in target.absolute().parents if os.path.lexists(path))
    try:
        Path(mkdtemp(prefix=f"{_prefix(target)}-", dir=parent)).rmdir()
    except OSError as error:
        raise _not_writable(target, error) from None


def _not_writable(target: Path, error: OSError) -> BundleError:
    fix = "Give a path in a folder that you can write."
    return BundleError(f"output {target}", got=error.strerror, expected="a writable folder", fix=fix)


def check_output(target: Path, *, force: bool, marker: str = MANIFEST) -> None:
    """Raise if something is at a path that must not be replaced.

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
    left = [held / OLD for held in held_folders(target.parent, _prefix(target)) if not is_held(held)]
    return next((old for old in left if old.is_dir() and not os.path.lexists(target)), None)


def _prefix(target: Path) -> str:
    return f".{target.name}.partial"


def _swap(held: Path, target: Path, *, force: bool, marker: str) -> None:
    """Rename a folder, in place of an existing one. If several processes replace it at once, the last one wins."""
    new, old = held / NEW, held / OLD
    try:
        while True:
            check_output(target, force=force, marker=marker)
            with suppress(FileNotFoundError):  # there is none, or another process has moved it away
                target.replace(old)
            try:
                new.replace(target)
                break
            except OSError as error:
                # Another process has put one there meanwhile, and may have moved it away again.
                if error.errno not in _OCCUPIED and not target.exists():
                    raise
            shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        if old.exists() and not os.path.lexists(target):
            old.replace(target)
        raise
    flush_to_disk(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _clean(target: Path) -> None:
    """Remove leftovers of dead processes, and restore a target that one of them was replacing when it died."""
    if (old := replaced_by_a_killed_process(target)) is not None:
        with suppress(FileNotFoundError):  # another process restores it too
            old.replace(target)
    remove_abandoned(target.parent, _prefix(target))


def _flush_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            flush_to_disk(Path(parent) / name)
        flush_to_disk(Path(parent))
