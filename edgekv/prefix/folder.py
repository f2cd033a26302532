"""The contents of a prefix folder, for listing and clearing; needs no bundle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from edgekv.errors import UsageError
from edgekv.prefix.blockfile import SUFFIX, BlockRecord, RejectedFileError, decode
from edgekv.prefix.catalogue import INDEX, Catalogue
from edgekv.prefix.keys import SECRET
from edgekv.prefix.private import read_private

_ID_CHARACTERS = 12


_Name = tuple[bytes, tuple[int, ...]]


class StoredPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence: its last block and all before it.

    Attributes:
        id: the first characters of the last block's name.
        tokens: number of tokens.
        bytes: of its files, including those that other sequences share.
        own_bytes: of the files that no other sequence needs.
        priority: of the last block.
        store: the folder of one bundle and engine.
    """

    id: str
    tokens: int
    bytes: int
    own_bytes: int
    priority: int
    store: str


class _Files:
    """The block files of one store, by salt and tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: dict[_Name, list[Path]] = {}
        self.records: dict[Path, BlockRecord] = {}
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            with suppress(OSError, RejectedFileError):  # the store rejects and counts them when it opens
                record = self.records[path] = decode(read_private(path)).record
                self.paths.setdefault((record.root, record.tokens), []).append(path)
        self._parents: dict[_Name, _Name | None] = {}  # the longest beginning of each that there is
        before: list[_Name] = []
        for name in sorted(self.paths):
            while before and not (before[-1][0] == name[0] and name[1][: len(before[-1][1])] == before[-1][1]):
                before.pop()
            self._parents[name] = before[-1] if before else None
            before.append(name)
        # A sequence that is a prefix of another one is not listed separately.
        self.ends = sorted(self.paths.keys() - {*self._parents.values()})
        self._readers = Counter(name for end in self.ends for name in self._names(end))

    def _names(self, end: _Name) -> Iterator[_Name]:
        """A sequence and its beginnings, the longest first."""
        name: _Name | None = end
        while name is not None:
            yield name
            name = self._parents[name]

    def chain(self, end: _Name) -> list[Path]:
        """The files of a sequence."""
        return [path for name in self._names(end) for path in self.paths[name]]

    def own(self, end: _Name) -> list[Path]:
        """The files that no other sequence needs."""
        return [path for name in self._names(end) if self._readers[name] == 1 for path in self.paths[name]]

    def prefixes(self) -> Iterator[tuple[StoredPrefix, list[Path]]]:
        """Each sequence with the files that only it needs."""
        for end in self.ends:
            last, own = self.paths[end][0], self.own(end)
            yield (
                StoredPrefix(
                    id=last.name[:_ID_CHARACTERS],
                    tokens=len(end[1]),
                    bytes=_size(self.chain(end)),
                    own_bytes=_size(own),
                    priority=self.records[last].priority,
                    store=self.folder.name,
                ),
                own,
            )


def stored_prefixes(folder: Path) -> list[StoredPrefix]:
    """The sequences in a prefix cache folder.

    Raises:
        UsageError: it is not a prefix folder.
    """
    return [prefix for files in _stores(folder) for prefix, _ in files.prefixes()]


def remove_stored(folder: Path, wanted: str | None) -> list[StoredPrefix]:
    """Remove the sequences whose id starts with `wanted` (None: all), except for files that others share; returns them.

    Raises:
        UsageError: it is not a prefix folder, or no sequence has such an id.
    """
    removed = []
    for files in _stores(folder):
        found = [(prefix, own) for prefix, own in files.prefixes() if wanted is None or prefix.id.startswith(wanted)]
        removed += [prefix for prefix, _ in found]
        gone = [*files.records] if wanted is None else [path for _, own in found for path in own]
        if found:
            _remove(files.folder, gone)
    if wanted is not None and not removed:
        raise UsageError("prefix", got=repr(wanted), expected="the id of one", fix=f"See edgekv prefix ls {folder}.")
    return removed


def _remove(folder: Path, paths: Sequence[Path]) -> None:
    """Remove files of a store, and their entries in the indexes that processes with an open store go by."""
    for path in paths:
        path.unlink(missing_ok=True)
    for home in (folder, folder.parent):
        if (home / INDEX).exists():
            catalogue = Catalogue(home)
            try:
                catalogue.remove("" if home == folder else folder.name, [path.name for path in paths])
            finally:
                catalogue.close()


def _stores(folder: Path) -> list[_Files]:
    folders = [key.parent for key in sorted([*folder.glob(SECRET), *folder.glob(f"*/{SECRET}")])]
    if not folders:
        found = "no prefixes" if folder.is_dir() else "no folder"
        fix = "Give the folder of --prefix-cache, or a bundle."
        raise UsageError(str(folder), got=found, expected="a folder of prefixes, or a bundle", fix=fix)
    return [_Files(each) for each in folders]


def _size(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)
