"""The folder of block files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edgekv.prefix.blockfile import BlockRecord, RejectedFileError, decode, encode
from edgekv.prefix.catalogue import LOCKED, Catalogue, Entry
from edgekv.prefix.config import StoreConfig
from edgekv.prefix.errors import PrefixError
from edgekv.prefix.groups import BlockGroup
from edgekv.prefix.keys import Keys, folder_secret, token_bytes, tokens_of
from edgekv.prefix.private import NotPrivateError, check_folder, make_folder, read_private, write_private
from edgekv.prefix.reconciliation import Reconciliation
from edgekv.prefix.stats import Counters


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A block file of this store in the folder.

    Attributes:
        name: of the file.
        record: its entry in the index.
        used_ns: time of the last use, ns since the epoch.
        file_bytes: its size.
    """

    name: str
    record: BlockRecord
    used_ns: int
    file_bytes: int


class DiskFolder:
    """Block files, written atomically and verified before use.

    The index counts the files of all stores below `limit_folder`, so the size limit applies to the folder regardless of
    how many processes write to it. When the folder is opened, the index is made to match the files; see
    `Reconciliation`.

    Attributes:
        keys: keyed hashes with the folder's own secret.
    """

    def __init__(
        self,
        folder: Path,
        limit_folder: Path,
        limit_bytes: int,
        store: bytes,
        step: int,
        limited: Sequence[bool],
        counters: Counters,
    ) -> None:
        """Open a folder; create it and its secret if they are missing.

        Args:
            folder: of the files.
            limit_folder: the folder itself or its parent; the limit applies to all files below it.
            limit_bytes: bytes of all files.
            store: digest of the store; files of other stores are not used.
            step: tokens per block.
            limited: for each group of layers, whether its attention window is limited.
            counters: updated by every operation.

        Raises:
            PrefixError: the folder cannot be used, or is writable by other users.
        """
        self._folder = folder
        self._home = "" if folder == limit_folder else folder.name
        self._limit_bytes = limit_bytes
        self._store = store
        self._step = step
        self._limited = limited
        self._counters = counters
        try:
            if limit_folder.exists():
                check_folder(limit_folder)  # before anything is written into another user's folder
            make_folder(folder)
            for each in {limit_folder, folder}:
                check_folder(each)
            self._catalogue = Catalogue(limit_folder)
            with self._catalogue.transaction():
                self.keys = Keys(folder_secret(folder))
                Reconciliation(self._catalogue, folder, self._home, store, self.keys, counters, self._entry).run()
        except NotPrivateError as error:
            fix = f"Give a folder of your own, and remove others' access: chmod -R go-rwx {limit_folder}"
            wanted = "a file or folder that only you can write"
            raise PrefixError(f"disk_folder {error.filename}", got=error.strerror, expected=wanted, fix=fix) from None
        except OSError as error:
            wanted, fix = "a writable folder", "Give a folder that you can write."
            if LOCKED in str(error):
                wanted = "an index that no other process is making"
                fix = "Wait until the process that opened the folder first has read it, and try again."
            raise PrefixError(f"disk_folder {folder}", got=error.strerror, expected=wanted, fix=fix) from None

    def close(self) -> None:
        """Close the index."""
        self._catalogue.close()

    def transaction(self) -> AbstractContextManager[None]:
        """Keep other processes from changing the folder; see `Catalogue.transaction`."""
        return self._catalogue.transaction()

    def is_changed(self) -> bool:
        """Whether another process has changed the folder since the last call."""
        try:
            return self._catalogue.is_changed()
        except OSError:
            return False

    def files(self) -> list[FoundFile]:
        """The files of this store, the least recently used first."""
        return [
            FoundFile(
                each.name,
                BlockRecord(each.store, each.layers, each.root, tokens_of(each.tokens), each.priority),
                each.used_ns,
                each.bytes,
            )
            for each in self._catalogue.entries(self._home)
            if each.store == self._store and each.root is not None
            if each.layers is not None and each.tokens is not None
        ]

    def encode(self, record: BlockRecord, rows: NDArray[Any]) -> bytes:
        """The file of a block."""
        return encode(record, rows, self.keys)

    def make_room(
        self,
        size_bytes: int,
        limit: tuple[int, int] | None,
        keep: Callable[[str], bool],
        evicted: Callable[[str], None],
    ) -> bool:
        """Evict files of any store below the folder until `size_bytes` more fit the limit.

        Args:
            size_bytes: bytes to be written.
            limit: evict no file of a greater (priority, last use in ns); None evicts any.
            keep: says for a file name of this store whether it must stay.
            evicted: called with the name of each file of this store that was evicted.

        Returns:
            Whether the bytes fit now.

        Raises:
            OSError: the index cannot be written.
        """

        def stays(entry: Entry) -> bool:
            return self._is_own(entry) and keep(entry.name)

        if size_bytes > self._limit_bytes:
            return False
        with self._catalogue.transaction():
            while self._catalogue.total_bytes() + size_bytes > self._limit_bytes:
                victim = self._catalogue.victim(stays)
                if victim is None or (limit is not None and (victim.priority, victim.used_ns) > limit):
                    return False
                self._counters.evictions[2] += 1
                self._catalogue.remove(victim.folder, [victim.name])
                self._unlink(self._catalogue.folder / victim.folder / victim.name)
                if self._is_own(victim):
                    evicted(victim.name)
        return True

    def write(self, record: BlockRecord, data: bytes, used_ns: int) -> bool:
        """Write a file and add it to the index; False if the disk refuses it or its parent file is gone.

        It is not flushed: after a power cut, an incomplete file fails its checksum.
        """
        name = record.name(self.keys)
        partial = self._folder / f".{name}.partial-{os.getpid()}"
        try:
            with self._catalogue.transaction():
                entry = self._entry(name, record, used_ns, len(data))
                if entry.parent is not None and not self._catalogue.has(self._home, entry.parent):
                    return False
                partial.unlink(missing_ok=True)
                write_private(partial, data)
                partial.replace(self._folder / name)
                self._catalogue.put(entry)
        except OSError:
            self._counters.failed_writes += 1
            self._unlink(partial)
            return False
        return True

    def read(self, record: BlockRecord) -> NDArray[Any] | None:
        """The verified rows of a block; None if the file is gone, or was rejected and removed."""
        name = record.name(self.keys)
        try:
            file = decode(read_private(self._folder / name))
            if file.record.name(self.keys) != name or file.record.fingerprint != record.fingerprint:
                raise RejectedFileError("it is another block")
            file.check(self.keys)
        except FileNotFoundError:
            self.remove([name])
            return None
        except (OSError, RejectedFileError):
            self.reject(name)
            return None
        return file.rows

    def remove(self, names: Iterable[str]) -> None:
        """Remove files of this store."""
        names = list(names)
        for name in names:
            self._unlink(self._folder / name)
        with suppress(OSError):
            self._catalogue.remove(self._home, names)

    def reject(self, name: str) -> None:
        """Count and remove an unusable file."""
        self._counters.rejected_files += 1
        self.remove([name])

    def touch(self, uses: Iterable[tuple[str, int, int]]) -> None:
        """Record the last use of files of this store; see `Catalogue.touch`."""
        with suppress(OSError):
            self._catalogue.touch(self._home, uses)

    def _is_own(self, entry: Entry) -> bool:
        return entry.folder == self._home and entry.store == self._store

    def _entry(self, name: str, record: BlockRecord, used_ns: int, file_bytes: int) -> Entry:
        return Entry(
            folder=self._home,
            name=name,
            store=record.fingerprint,
            root=record.root,
            layers=record.group,
            parent=self._parent(record),
            tokens=token_bytes(record.tokens),
            priority=record.priority,
            used_ns=used_ns,
            bytes=file_bytes,
        )

    def _parent(self, record: BlockRecord) -> str | None:
        """The parent file of a block of full attention."""
        before = record.tokens[: (len(record.tokens) - 1) // self._step * self._step]
        is_own = record.fingerprint == self._store and record.group < len(self._limited)
        if not before or not is_own or self._limited[record.group]:
            return None
        return replace(record, tokens=before).name(self.keys)

    def _unlink(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def open_folder(
    config: StoreConfig, store: bytes, groups: Sequence[BlockGroup], counters: Counters
) -> DiskFolder | None:
    """Open the folder of a configuration; None if it has none. See `DiskFolder`."""
    if config.disk_folder is None:
        return None
    limited = [group.window is not None for group in groups]
    home = config.disk_limit_folder or config.disk_folder
    return DiskFolder(
        config.disk_folder, home, config.disk_cache_size, store, config.tokens_per_block, limited, counters
    )
