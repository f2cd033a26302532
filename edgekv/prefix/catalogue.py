"""The index of the block files below a folder, shared by all processes that use it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgekv.prefix.private import read_private, write_private

INDEX = "index.sqlite"
LOCKED = "database is locked"  # SQLite's words
_FORMAT = 1
_BUSY_S = 30
_SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (
    folder TEXT NOT NULL, name TEXT NOT NULL, store BLOB, root BLOB, layers INTEGER, parent TEXT, tokens BLOB,
    priority INTEGER NOT NULL, used_ns INTEGER NOT NULL, bytes INTEGER NOT NULL, PRIMARY KEY (folder, name));
CREATE INDEX IF NOT EXISTS by_use ON blocks (priority, used_ns);
CREATE INDEX IF NOT EXISTS by_parent ON blocks (folder, parent);
"""
_COLUMNS = "folder, name, store, root, layers, parent, tokens, priority, used_ns, bytes"


@dataclass(frozen=True, slots=True)
class Entry:
    """One block file.

    Attributes:
        folder: the store's folder, relative to that of the index.
        name: of the file.
        store: digest of the store that wrote it; this and the next four fields are None until the file has been read.
        root: key of the salt.
        layers: index of the group of layers.
        parent: the file that this one depends on.
        tokens: the sequence up to the end of the block, as 64-bit integers.
        priority: 0 to 100; files of low priority are evicted first.
        used_ns: time of the last use, ns since the epoch.
        bytes: size of the file.
    """

    folder: str
    name: str
    store: bytes | None
    root: bytes | None
    layers: int | None
    parent: str | None
    tokens: bytes | None
    priority: int
    used_ns: int
    bytes: int


class Catalogue:
    """Sizes, order of use and dependencies of block files, shared by several processes.

    SQLite serializes the writers. Its write-ahead log is used where the file system supports one. A
    damaged index is deleted and rebuilt from the files.

    Attributes:
        folder: location of the index.
    """

    def __init__(self, folder: Path) -> None:
        """Open or create the index of a folder.

        Raises:
            OSError: the index cannot be opened, or is owned or writable by another user.
        """
        self.folder = folder
        self._depth = 0
        path = folder / INDEX
        with suppress(FileExistsError):
            write_private(path, b"")  # SQLite creates its other files with the mode of this one
        read_private(path, secret=True)
        try:
            self._connection = _connect(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise OSError(5, str(error), str(path)) from None
            for each in (path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm", "-journal"))):
                each.unlink(missing_ok=True)
            write_private(path, b"")
            with _as_os_errors():
                self._connection = _connect(path)
        self._version = self._data_version()

    def close(self) -> None:
        """Close the index; no other method may be called after it."""
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Lock out other writers. Changes are committed together, or rolled back if the block raises; may be nested.

        Raises:
            OSError: the index cannot be written, or other processes keep it locked for too long.
        """
        if self._depth:
            yield
            return
        with _as_os_errors():
            self._connection.execute("BEGIN IMMEDIATE")
        self._depth += 1
        try:
            yield
            with _as_os_errors():
                self._connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise
        finally:
            self._depth -= 1

    def is_changed(self) -> bool:
        """Whether another process has changed the index since the last call."""
        version, self._version = self._version, self._data_version()
        return version != self._version

    def total_bytes(self) -> int:
        """Bytes of all files."""
        return int(self._select("SELECT coalesce(sum(bytes), 0) FROM blocks")[0][0])

    def entries(self, folder: str | None = None) -> list[Entry]:
        """All files, or those of one store's folder, the least recently used first."""
        where = "" if folder is None else " WHERE folder = ?"
        rows = self._select(
            f"SELECT {_COLUMNS} FROM blocks{where} ORDER BY used_ns", *([] if folder is None else [folder])
        )
        return [Entry(*row) for row in rows]

    def has(self, folder: str, name: str) -> bool:
        """Whether a file is listed."""
        return bool(self._select("SELECT 1 FROM blocks WHERE folder = ? AND name = ?", folder, name))

    def victim(self, keep: Callable[[Entry], bool]) -> Entry | None:
        """The file to evict next: lowest priority, then least recently used, among those that no other file needs."""
        with _as_os_errors():
            rows = self._connection.execute(
                f"SELECT {_COLUMNS} FROM blocks b WHERE NOT EXISTS (SELECT 1 FROM blocks c WHERE c.folder = b.folder "
                "AND c.parent = b.name) ORDER BY priority, used_ns"
            )
            return next((entry for row in rows if not keep(entry := Entry(*row))), None)

    def put(self, entry: Entry) -> None:
        """Add a file, or replace its entry."""
        values = [getattr(entry, name) for name in _COLUMNS.split(", ")]
        self._write(f"INSERT OR REPLACE INTO blocks ({_COLUMNS}) VALUES ({', '.join('?' * len(values))})", [values])

    def remove(self, folder: str, names: Iterable[str]) -> None:
        """Remove the entries of these files."""
        self._write("DELETE FROM blocks WHERE folder = ? AND name = ?", [(folder, name) for name in names])

    def touch(self, folder: str, uses: Iterable[tuple[str, int, int]]) -> None:
        """Record the last use of files.

        Args:
            folder: their store's folder.
            uses: name, priority and time of use in ns of each file.
        """
        self._write(
            "UPDATE blocks SET priority = ?, used_ns = max(used_ns, ?) WHERE folder = ? AND name = ?",
            [(priority, used_ns, folder, name) for name, priority, used_ns in uses],
        )

    def _data_version(self) -> int:
        return int(self._select("PRAGMA data_version")[0][0])

    def _select(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with _as_os_errors():
            return self._connection.execute(query, values).fetchall()

    def _write(self, statement: str, values: Sequence[Sequence[object]]) -> None:
        with self.transaction(), _as_os_errors():
            self._connection.executemany(statement, values)


def _connect(path: Path) -> sqlite3.Connection:
    # Generations of one model take turns, whichever thread they run in.
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        columns = [row[1] for row in connection.execute("PRAGMA table_info(blocks)")]
        if version not in (0, _FORMAT) or (columns and columns != _COLUMNS.split(", ")):
            raise sqlite3.DatabaseError("another format")
        with suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA journal_mode = WAL")  # needs shared memory, which network disks lack
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {_FORMAT}; COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise OSError for errors of the index."""
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(5, f"SQLite: {error}") from None
