"""Makes the index of a folder match its block files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from edgekv.prefix.blockfile import SUFFIX, BlockRecord, RejectedFileError, decode
from edgekv.prefix.catalogue import Catalogue, Entry
from edgekv.prefix.keys import SECRET, Keys
from edgekv.prefix.private import NotPrivateError, read_private
from edgekv.prefix.retention import DEFAULT_PRIORITY
from edgekv.prefix.stats import Counters
from edgekv.system import is_alive

_NAME = re.compile(r"[0-9a-f]{32}-g\d+\.safetensors")
_PARTIAL = re.compile(r"\..+\.partial-(\d+)")


class Reconciliation:
    """New files are read in the store's own folder, and listed by size in those of other stores.

    A file of another fingerprint, or without a block file's name, is counted as rejected and left alone. A file with
    a block file's name whose content does not match the name is counted and removed.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        folder: Path,
        home: str,
        store: bytes,
        keys: Keys,
        counters: Counters,
        entry_of: Callable[[str, BlockRecord, int, int], Entry],
    ) -> None:
        """Prepare.

        Args:
            catalogue: the index.
            folder: the store's own.
            home: its name in the index.
            store: digest of the store.
            keys: of the folder.
            counters: rejected files are counted there.
            entry_of: the entry of a file name, its record, time of last use in ns and bytes.
        """
        self._catalogue = catalogue
        self._folder = folder
        self._home = home
        self._store = store
        self._keys = keys
        self._counters = counters
        self._entry_of = entry_of

    def run(self) -> None:
        """Add files without an entry, and drop entries without a file; the caller holds the index's transaction."""
        listed = {(each.folder, each.name): each for each in self._catalogue.entries()}
        home = self._catalogue.folder
        others = [path.parent for path in home.glob(f"*/{SECRET}")]
        found: set[tuple[str, str]] = set()
        for folder in {home, self._folder, *others}:
            where = "" if folder == home else folder.name
            with os.scandir(folder) as files:
                for file in sorted(files, key=lambda file: file.name):
                    if where == self._home and (partial := _PARTIAL.fullmatch(file.name)):
                        if not is_alive(int(partial[1])):
                            _unlink(Path(file.path))
                    elif file.name.endswith(SUFFIX):
                        entry = self._found(file, where, listed.get((where, file.name)))
                        if entry is not None:
                            found.add((where, file.name))
                            if entry is not listed.get((where, file.name)):
                                self._catalogue.put(entry)
        for where, name in set(listed) - found:
            self._catalogue.remove(where, [name])

    def _found(self, file: os.DirEntry[str], where: str, listed: Entry | None) -> Entry | None:
        """The index entry of a file in the folder; None if it must not be listed."""
        try:
            status = file.stat(follow_symlinks=False)
        except OSError:
            return None
        if listed is not None and listed.bytes == status.st_size:
            if where != self._home or listed.store == self._store:
                return listed
            if listed.store is not None:
                self._counters.rejected_files += 1  # another store's
                return listed
        if where != self._home:
            if _NAME.fullmatch(file.name) is None:
                return None
            return Entry(
                where, file.name, None, None, None, None, None, DEFAULT_PRIORITY, status.st_mtime_ns, status.st_size
            )
        try:
            record = self._identify(Path(file.path))
        except (OSError, RejectedFileError):
            self._counters.rejected_files += 1
            return None
        if record.fingerprint != self._store:
            self._counters.rejected_files += 1
        return self._entry_of(file.name, record, status.st_mtime_ns, status.st_size)

    def _identify(self, path: Path) -> BlockRecord:
        named = _NAME.fullmatch(path.name) is not None
        try:
            record = decode(read_private(path)).record
            if named and record.fingerprint == self._store and record.name(self._keys) != path.name:
                raise RejectedFileError("it is not what its name says")
        except (NotPrivateError, RejectedFileError):
            if named:
                _unlink(path)
            raise
        if not named:
            raise RejectedFileError("it is foreign")
        return record


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
