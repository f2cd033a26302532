"""The table of the blocks in a folder, shared by all processes that use it."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from edgekv.prefix.block import SNAPSHOT, BlockId
from edgekv.prefix.keys import SECRET_BYTES
from edgekv.prefix.private import read_private, write_private

INDEX = "blocks.sqlite"
SUFFIX = ".safetensors"
LOCKED = "database is locked"  # SQLite's words
_FORMAT = 2
_BUSY_S = 30
_MAX_NAMES = 500  # parameters of one query; SQLite allows 999 at least
_SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (
    key BLOB NOT NULL, part INTEGER NOT NULL, parent BLOB NOT NULL, tokens BLOB NOT NULL, start INTEGER NOT NULL,
    chained INTEGER NOT NULL, priority INTEGER NOT NULL, used INTEGER NOT NULL, size_bytes INTEGER NOT NULL,
    store TEXT NOT NULL, PRIMARY KEY (key, part)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_parent ON blocks (parent, part, tokens);
CREATE INDEX IF NOT EXISTS by_use ON blocks (priority, used);
CREATE TABLE IF NOT EXISTS secret (value BLOB NOT NULL);
"""


class Row(NamedTuple):
    """One block file: what it holds, as in `Link` and `Block`.

    Attributes:
        size_bytes: of the file.
        store: a short digest of the model that wrote it.
    """

    key: bytes
    part: int
    parent: bytes
    tokens: bytes
    start: int
    chained: bool
    priority: int
    used: int
    size_bytes: int
    store: str


_COLUMNS = ", ".join(Row._fields)


def file_name(id: BlockId) -> str:
    """The name of a block's file; it reveals neither tokens nor salt."""
    key, part = id
    return f"{key.hex()}-{'s' if part == SNAPSHOT else f'g{part}'}{SUFFIX}"


class Table:
    """Rows of block files. SQLite serializes the writers; its write-ahead log is used where the file system has one.

    Attributes:
        was_damaged: whether the file was no table of this format, so that an empty one was made.
        secret: of the keys in the table; made with it.
    """

    def __init__(self, folder: Path) -> None:
        """Open the table of a folder, or make an empty one.

        Raises:
            OSError: it cannot be opened, or is owned or writable by another user.
        """
        self.was_damaged = False
        self._depth = 0
        path = folder / INDEX
        with suppress(FileExistsError):
            write_private(path, b"")  # SQLite creates its other files with the mode of this one
        read_private(path, 0, secret=True)
        with _as_os_errors():
            try:
                self._connection, self.secret = _connect(path)
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:
                self.was_damaged = True
                for suffix in ("", "-wal", "-shm", "-journal"):
                    path.with_name(INDEX + suffix).unlink(missing_ok=True)
                write_private(path, b"")
                self._connection, self.secret = _connect(path)

    def close(self) -> None:
        """Close the table; no other method may be called after it."""
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Lock out other writers. Changes are committed together, or rolled back if the block raises; may be nested.

        Raises:
            OSError: the table cannot be written, or other processes keep it locked for too long.
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

    @property
    def version(self) -> tuple[int, int]:
        """Differs whenever this or another process has changed the table."""
        with _as_os_errors():
            (foreign,) = self._connection.execute("PRAGMA data_version").fetchone()
        return foreign, self._connection.total_changes

    def rows(self) -> list[Row]:
        """All rows, the first blocks of sequences first."""
        return self._select("ORDER BY start")

    def named(self, keys: Sequence[bytes]) -> Iterator[Row]:
        """The rows of these keys, of all parts."""
        for at in range(0, len(keys), _MAX_NAMES):
            piece = keys[at : at + _MAX_NAMES]
            yield from self._select(f"WHERE key IN ({_marks(piece)})", *piece)

    def neighbours(self, parent: BlockId, tokens: bytes) -> list[Row]:
        """The rows after a parent whose tokens sort just before `tokens`, and not before it."""
        here = "WHERE parent = ? AND part = ? AND tokens"
        return [
            *self._select(f"{here} < ? ORDER BY tokens DESC LIMIT 1", *parent, tokens),
            *self._select(f"{here} >= ? ORDER BY tokens LIMIT 1", *parent, tokens),
        ]

    def children(self, parents: Sequence[bytes], part: int) -> Iterator[Row]:
        """The rows of a part after any of these blocks."""
        for at in range(0, len(parents), _MAX_NAMES):
            piece = parents[at : at + _MAX_NAMES]
            yield from self._select(f"WHERE parent IN ({_marks(piece)}) AND part = ?", *piece, part)

    def has(self, id: BlockId) -> bool:
        """Whether a block has a row."""
        return bool(self._select("WHERE key = ? AND part = ?", *id))

    def descendants(self, row: Row) -> list[Row]:
        """The chained rows that are of no use without a row, parents first; the row itself is not among them."""
        found: list[Row] = []
        newest = [row.key] if row.chained else []
        while newest:
            fresh = [*self.children(newest, row.part)]
            found += fresh
            newest = [each.key for each in fresh]
        return found

    def held(self, store: str | None = None) -> tuple[int, int]:
        """Rows and bytes of one store, or of all."""
        where, values = ("", ()) if store is None else (" WHERE store = ?", (store,))
        with _as_os_errors():
            query = f"SELECT count(*), coalesce(sum(size_bytes), 0) FROM blocks{where}"
            blocks, size_bytes = self._connection.execute(query, values).fetchone()
        return blocks, size_bytes

    def last_used(self) -> int:
        """The latest use of any block; 0 without blocks."""
        with _as_os_errors():
            (used,) = self._connection.execute("SELECT coalesce(max(used), 0) FROM blocks").fetchone()
        return int(used)

    def evictable(self) -> Iterator[Row]:
        """The rows that no other row needs: lowest priority first, then least recently used."""
        with _as_os_errors():
            rows = self._connection.execute(
                f"SELECT {_COLUMNS} FROM blocks b WHERE NOT (chained AND EXISTS (SELECT 1 FROM blocks c "
                "WHERE c.parent = b.key AND c.part = b.part)) ORDER BY priority, used"
            )
            yield from map(Row._make, rows)

    def put(self, row: Row) -> None:
        """Add a row."""
        self._write(f"INSERT OR REPLACE INTO blocks ({_COLUMNS}) VALUES ({_marks(row)})", [row])

    def remove(self, ids: Iterable[BlockId]) -> None:
        """Remove rows."""
        self._write("DELETE FROM blocks WHERE key = ? AND part = ?", ids)

    def touch(self, uses: Iterable[tuple[int, int, bytes, int]]) -> None:
        """Record the priority and the last use of rows, given with key and part."""
        self._write("UPDATE blocks SET priority = ?, used = max(used, ?) WHERE key = ? AND part = ?", uses)

    def _select(self, clause: str, *values: object) -> list[Row]:
        with _as_os_errors():
            return [*map(Row._make, self._connection.execute(f"SELECT {_COLUMNS} FROM blocks {clause}", values))]

    def _write(self, statement: str, values: Iterable[Sequence[object]]) -> None:
        with self.transaction(), _as_os_errors():
            self._connection.executemany(statement, values)


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _connect(path: Path) -> tuple[sqlite3.Connection, bytes]:
    # Generations of one model take turns, whichever thread they run in.
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        columns = [row[1] for row in connection.execute("PRAGMA table_info(blocks)")]
        if version not in (0, _FORMAT) or (columns and columns != [*Row._fields]):
            raise sqlite3.DatabaseError("another format")
        if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("damaged pages")
        with suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA journal_mode = WAL")  # needs shared memory, which network disks lack
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {_FORMAT}; COMMIT")
        new = "INSERT INTO secret SELECT ? WHERE NOT EXISTS (SELECT 1 FROM secret)"
        connection.execute(new, (os.urandom(SECRET_BYTES),))
        (secret,) = connection.execute("SELECT value FROM secret").fetchone()
        if not isinstance(secret, bytes) or len(secret) != SECRET_BYTES:
            raise sqlite3.DatabaseError("another secret")
    except BaseException:
        connection.close()
        raise
    return connection, secret


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise OSError for errors of the table."""
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(errno.EIO, f"SQLite: {error}") from None
