"""The table of the blocks in a folder, shared by all processes that use it."""

from __future__ import annotations

import errno
import os
import sqlite3
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from edgekv.errors import EdgeKVWarning, PrefixError
from edgekv.machine.private_file import read_private, write_private
from edgekv.prefix.block import FORMAT, SNAPSHOT, BlockId
from edgekv.prefix.keys import SECRET_BYTES

INDEX = "blocks.sqlite"
LOCKED = "database is locked"  # SQLite's words
_BUSY_S = 30
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
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


class _DamagedError(sqlite3.DatabaseError):
    """A table whose content is damaged."""


class Row(NamedTuple):
    """One block file: what it holds, as in `Link` and `Block`.

    `size_bytes` are those of the file; `store` is a short digest of the model that wrote it.
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

    @property
    def file(self) -> str:
        """The file's name; it reveals neither tokens nor salt."""
        return file_name((self.key, self.part))


_COLUMNS = ", ".join(Row._fields)


def file_name(id: BlockId) -> str:
    key, part = id
    return f"{key.hex()}-{'s' if part == SNAPSHOT else f'g{part}'}.safetensors"


class Table:
    """Rows of block files, and the secret of their keys.

    SQLite serializes the writers; its write-ahead log is used where the file system has one. All methods raise OSError
    if the table cannot be read, or not written within half a minute.
    """

    def __init__(self, folder: Path, *, is_ours: bool = True) -> None:
        """Open the table of a folder.

        Args:
            folder: with the table.
            is_ours: whether blocks are written here: if there is no table, or it is damaged, an empty one is made, and
                the latter is said.

        Raises:
            NotPrivateError: another user could have written it.
            PrefixError: it is of another version or program, which is never changed; or damaged and not ours.
        """
        path = folder / INDEX
        if is_ours:
            with suppress(FileExistsError):
                write_private(path, b"")  # SQLite creates its other files with the mode of this one
        read_private(path, 0, secret=True)
        with _as_os_errors():
            try:
                self._connection, self.secret = _connect(path)
            except sqlite3.DatabaseError as error:
                if not isinstance(error, _DamagedError) and error.sqlite_errorcode & 0xFF not in _DAMAGED:
                    raise
                if not is_ours:
                    fix = f"Remove its blocks, which nobody can read: rm -r {folder}"
                    raise PrefixError(str(path), got="a damaged table", expected="a whole one", fix=fix) from None
                text = f"prefix cache: {path} was damaged; the cache starts empty"
                warnings.warn(text, EdgeKVWarning, stacklevel=2)
                for suffix in ("", "-wal", "-shm", "-journal"):
                    path.with_name(INDEX + suffix).unlink(missing_ok=True)
                write_private(path, b"")
                self._connection, self.secret = _connect(path)

    def close(self) -> None:
        """Close the table; no other method may be called after it."""
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Lock out other writers. Changes are committed together, or rolled back if the block raises; may be nested."""
        if self._connection.in_transaction:
            yield
            return
        try:
            with _as_os_errors():
                self._connection.execute("BEGIN IMMEDIATE")
            yield
            with _as_os_errors():
                self._connection.execute("COMMIT")
        except BaseException:  # also Ctrl-C right behind BEGIN: an open transaction would lock all others out for ever
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise

    def rows(self) -> list[Row]:
        """All rows, the first blocks of sequences first."""
        return self._select("ORDER BY start")

    def named(self, keys: Sequence[bytes]) -> list[Row]:
        """The rows of these keys, of all parts."""
        return self._select_in("key", keys)

    def neighbours(self, parent: BlockId, tokens: bytes) -> list[Row]:
        """The rows after a parent whose tokens sort just before `tokens`, and not before it."""
        here = "WHERE parent = ? AND part = ? AND tokens"
        return [
            *self._select(f"{here} < ? ORDER BY tokens DESC LIMIT 1", *parent, tokens),
            *self._select(f"{here} >= ? ORDER BY tokens LIMIT 1", *parent, tokens),
        ]

    def children(self, parents: Sequence[bytes], part: int) -> list[Row]:
        """The rows of a part after any of these blocks."""
        return self._select_in("parent", parents, f"AND part = {part}")

    def has(self, id: BlockId) -> bool:
        return bool(self._select("WHERE key = ? AND part = ?", *id))

    def evictable(self) -> Iterator[Row]:
        """The rows that no other row needs: lowest priority first, then least recently used."""
        return self._rows(
            "b WHERE NOT (chained AND EXISTS (SELECT 1 FROM blocks c WHERE c.parent = b.key AND c.part = b.part)) "
            "ORDER BY priority, used"
        )

    def held(self, store: str | None = None) -> tuple[int, int]:
        """Rows and bytes of one store, or of all."""
        return self._one(
            "SELECT count(*), coalesce(sum(size_bytes), 0) FROM blocks WHERE ? IN (store, '')", store or ""
        )

    def last_used(self) -> int:
        """The latest use of any block; 0 without blocks."""
        return int(self._one("SELECT coalesce(max(used), 0) FROM blocks")[0])

    @property
    def version(self) -> tuple[int, int]:
        """Differs whenever this or another process has changed the table."""
        return self._one("PRAGMA data_version")[0], self._connection.total_changes

    def put(self, row: Row) -> None:
        self._write(f"INSERT OR REPLACE INTO blocks ({_COLUMNS}) VALUES ({', '.join('?' * len(row))})", [row])

    def remove(self, rows: Iterable[Row]) -> None:
        self._write("DELETE FROM blocks WHERE key = ? AND part = ?", ((row.key, row.part) for row in rows))

    def touch(self, uses: Iterable[tuple[int, int, bytes, int]]) -> None:
        """Record the priority and the last use of rows, given with key and part."""
        self._write("UPDATE blocks SET priority = ?, used = max(used, ?) WHERE key = ? AND part = ?", uses)

    def _rows(self, clause: str, *values: object) -> Iterator[Row]:
        with _as_os_errors():
            yield from map(Row._make, self._connection.execute(f"SELECT {_COLUMNS} FROM blocks {clause}", values))

    def _select(self, clause: str, *values: object) -> list[Row]:
        return [*self._rows(clause, *values)]

    def _select_in(self, column: str, values: Sequence[bytes], more: str = "") -> list[Row]:
        pieces = [values[at : at + _MAX_NAMES] for at in range(0, len(values), _MAX_NAMES)]
        marks = [", ".join("?" * len(piece)) for piece in pieces]
        selected = (self._rows(f"WHERE {column} IN ({m}) {more}", *p) for m, p in zip(marks, pieces, strict=True))
        return [row for rows in selected for row in rows]

    def _one(self, query: str, *values: object) -> tuple[Any, ...]:
        with _as_os_errors():
            return self._connection.execute(query, values).fetchone()  # type: ignore[no-any-return]

    def _write(self, statement: str, values: Iterable[Sequence[object]]) -> None:
        with self.transaction(), _as_os_errors():
            self._connection.executemany(statement, values)


def _connect(path: Path) -> tuple[sqlite3.Connection, bytes]:
    # Generations of one model take turns, whichever thread they run in.
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        _check_format(connection, path)
        if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise _DamagedError("damaged pages")
        with suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA journal_mode = WAL")  # needs shared memory, which network disks lack
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT")
        new = "INSERT INTO secret SELECT ? WHERE NOT EXISTS (SELECT 1 FROM secret)"
        connection.execute(new, (os.urandom(SECRET_BYTES),))
        (secret,) = connection.execute("SELECT value FROM secret").fetchone()
        if not isinstance(secret, bytes) or len(secret) != SECRET_BYTES:
            raise _DamagedError("another secret")
    except BaseException:
        connection.close()
        raise
    return connection, secret


def _check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a database that this version has not made."""
    connection.execute("BEGIN")  # another process may make the tables at this moment
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    columns = [row[1] for row in connection.execute("PRAGMA table_info(blocks)")]
    is_empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    connection.execute("COMMIT")
    if version == 0 and is_empty:
        return
    if version != FORMAT or columns not in ([], [*Row._fields]):
        got = f"a table of format {version}" if version not in (0, FORMAT) else "a table of another program"
        fix = f"Use the edgekv that wrote it, or another folder; or remove this one: rm -r {path.parent}"
        raise PrefixError(str(path), got=got, expected=f"format {FORMAT}", fix=fix)


@contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(errno.EIO, f"SQLite: {error}") from None
