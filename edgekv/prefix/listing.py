"""The contents of a prefix folder, for listing and clearing; needs no bundle."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from edgekv.errors import UsageError
from edgekv.machine.private_file import check_folder
from edgekv.prefix.keys import TOKEN_BYTES
from edgekv.prefix.table import INDEX, Row, Table

_ID_CHARACTERS = 12


class StoredPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence: its last block and all before it.

    Attributes:
        id: the first characters of the last block's key.
        tokens: number of tokens.
        bytes: of its files, including those that other sequences share.
        own_bytes: of the files that no other sequence needs.
        priority: of the last block.
        store: a short digest of the model and engine.
    """

    id: str
    tokens: int
    bytes: int
    own_bytes: int
    priority: int
    store: str


class _Sequences:
    """The blocks of a table by key, the first ones of sequences first, and the sequences that end in the last."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows: dict[bytes, list[Row]] = defaultdict(list)
        for row in rows:
            self.rows[row.key].append(row)
        self._parents = {key: parts[0].parent for key, parts in self.rows.items()}
        # A sequence that is a prefix of another one is not listed separately.
        self.ends = self.rows.keys() - {*self._parents.values()}
        self._readers = Counter(self.ends)
        for key in reversed(self.rows):
            if self._parents[key] in self.rows:
                self._readers[self._parents[key]] += self._readers[key]
        self._bytes: dict[bytes, int] = {}
        for key, parent in self._parents.items():
            self._bytes[key] = sum(row.size_bytes for row in self.rows[key]) + self._bytes.get(parent, 0)

    def own(self, end: bytes) -> Iterator[Row]:
        """The rows that no other sequence needs."""
        key = end
        while key in self.rows and self._readers[key] == 1:
            yield from self.rows[key]
            key = self._parents[key]

    def prefix(self, end: bytes) -> StoredPrefix:
        last = self.rows[end][0]
        return StoredPrefix(
            id=end.hex()[:_ID_CHARACTERS],
            tokens=last.start + len(last.tokens) // TOKEN_BYTES,
            bytes=self._bytes[end],
            own_bytes=sum(row.size_bytes for row in self.own(end)),
            priority=last.priority,
            store=last.store,
        )


def stored_prefixes(folder: Path) -> list[StoredPrefix]:
    """The sequences in a prefix cache folder; UsageError if it is none, of another version, or cannot be read."""
    with _opened(folder) as table:
        sequences = _Sequences(table.rows())
        return [sequences.prefix(end) for end in sorted(sequences.ends)]


def remove_stored(folder: Path, id_start: str | None) -> list[StoredPrefix]:
    """Remove the sequences whose id starts with `id_start` (None: all), but no file that others share. Returns them.

    Raises:
        UsageError: it is not a prefix folder of this version, it cannot be changed, or no sequence has such an id.
    """
    with _opened(folder) as table, table.transaction():
        sequences = _Sequences(table.rows())
        ends = sorted(
            end for end in sequences.ends if id_start is None or end.hex()[:_ID_CHARACTERS].startswith(id_start)
        )
        if id_start is not None and not ends:
            fix = f"See edgekv prefix ls {folder}."
            raise UsageError("prefix", got=repr(id_start), expected="the id of one", fix=fix)
        gone = table.rows() if id_start is None else [row for end in ends for row in sequences.own(end)]
        table.remove(gone)
        for row in gone:
            with suppress(OSError):
                (folder / row.file).unlink(missing_ok=True)
        return [sequences.prefix(end) for end in ends]


@contextmanager
def _opened(folder: Path) -> Iterator[Table]:
    if not (folder / INDEX).exists():
        got = "no prefixes" if folder.is_dir() else "no folder"
        fix = "Give the folder of --prefix-cache, or a bundle."
        raise UsageError(str(folder), got=got, expected="a folder of prefixes, or a bundle", fix=fix)
    try:
        check_folder(folder)
        table = Table(folder, is_ours=False)
        try:
            yield table
        finally:
            table.close()
    except OSError as error:
        fix = f"Use the account that owns it, and remove others' access: chmod -R go-rwx {folder}"
        raise UsageError(str(folder), got=error.strerror, expected="a folder of your own", fix=fix) from None
