"""The folder: block files, and the table of them."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from edgekv.prefix.block import (
    SNAPSHOT,
    Arrays,
    Block,
    BlockId,
    RejectedFileError,
    decode_block,
    encode_block,
)
from edgekv.prefix.errors import PrefixError, PrefixWarning
from edgekv.prefix.keys import Keys
from edgekv.prefix.private import NotPrivateError, check_folder, make_folder, read_private, write_private
from edgekv.prefix.stats import StoreStats
from edgekv.prefix.table import INDEX, LOCKED, Row, Table, file_name

T = TypeVar("T")

_OWN = re.compile(r"[0-9a-f]{32}-(?:g\d+|s)\.safetensors|\..+\.partial-\d+")
_OLD_INDEX = "index.sqlite"  # of the format before this one


class Disk:
    """Block files, written atomically and verified before use, below a limit for all processes and models.

    A file is written, and files are removed, while the table is locked. Whatever a killed process left between a file
    and its row is cleared when the folder is opened.

    Attributes:
        keys: keyed hashes with the folder's secret.
    """

    def __init__(self, folder: Path, limit_bytes: int, store: str, counters: StoreStats) -> None:
        """Open a folder; create it and its table if they are missing.

        Args:
            folder: of the files.
            limit_bytes: bytes of all files.
            store: short digest of the model, for listings.
            counters: updated by every operation.

        Raises:
            PrefixError: the folder cannot be used, is of an older format, or is writable by other users.
        """
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._store = store
        self._counters = counters
        self._uses: dict[BlockId, tuple[int, int]] = {}
        self._total_bytes = 0  # of all files, while the table is locked for writing
        self._held: tuple[tuple[int, int], tuple[int, int]] | None = None
        self._has_failed = False
        try:
            make_folder(folder)
            check_folder(folder)
            if (folder / _OLD_INDEX).exists():
                fix = f"Remove it, or give another folder: rm -r {folder}"
                raise PrefixError(f"disk_folder {folder}", got="one of an older format", expected="a new one", fix=fix)
            self._table = Table(folder)
            with self._table.transaction():
                self._clear_remnants()
        except NotPrivateError as error:
            fix = f"Give a folder of your own, and remove others' access: chmod -R go-rwx {folder}"
            wanted = "a file or folder that only you can write"
            raise PrefixError(f"disk_folder {error.filename}", got=error.strerror, expected=wanted, fix=fix) from None
        except OSError as error:
            wanted, fix = "a writable folder", "Give a folder that you can write."
            if LOCKED in str(error):
                wanted = "a table that no other process is writing"
                fix = "Wait until the other process has written its blocks, and try again."
            raise PrefixError(f"disk_folder {folder}", got=error.strerror, expected=wanted, fix=fix) from None
        self.keys = Keys(self._table.secret)
        if self._table.was_damaged:
            self._warn(f"{folder / INDEX} was damaged; the cache starts empty")

    def close(self) -> None:
        """Write the last uses of blocks to the table, and close it."""
        with suppress(OSError):
            self._flush()
        self._table.close()

    def last_used(self) -> int:
        """The latest use of any block."""
        return self._read(self._table.last_used, 0)

    def held(self) -> tuple[int, int]:
        """Files and bytes of this store; the table is read only after a change."""

        def current() -> tuple[int, int]:
            version = self._table.version
            if self._held is None or self._held[0] != version:
                self._held = version, self._table.held(self._store)
            return self._held[1]

        return self._read(current, (0, 0))

    # ------------------------------------------------------------------ find and read

    def find(self, keys: Sequence[bytes]) -> dict[BlockId, Row]:
        """The rows of these keys, of all parts."""
        return self._read(lambda: {(row.key, row.part): row for row in self._table.named(keys)}, {})

    def neighbours(self, parent: BlockId, tokens: bytes) -> list[bytes]:
        """As `Memory.neighbours`."""
        return self._read(lambda: [row.tokens for row in self._table.neighbours(parent, tokens)], [])

    def children(self, parents: Sequence[bytes], part: int) -> list[Row]:
        """The rows of a part after any of these blocks."""
        return self._read(lambda: [*self._table.children(parents, part)], [])

    def load(self, row: Row, is_right: Callable[[Arrays], bool]) -> Arrays | None:
        """The verified arrays of a block; None if the file is gone, or was rejected and removed.

        Args:
            row: of the block.
            is_right: checks names, types and shapes; a checksum does not.
        """
        id = row.key, row.part
        try:
            content = read_private(self._folder / file_name(id), row.size_bytes + 1)
            arrays = decode_block(id, content, self.keys)
            if not is_right(arrays):
                raise RejectedFileError("the arrays are not those of the model")
        except FileNotFoundError:
            self._drop([row])
            return None
        except (OSError, RejectedFileError):
            self._counters.rejected_files += 1
            self._drop([row])
            return None
        self._counters.disk.bytes_out += len(content)
        return arrays

    # ------------------------------------------------------------------ write and remove

    def used(self, block: Block) -> None:
        """Record that a block was used; it may have a file."""
        if block.is_saved:
            self._uses[block.id] = block.lasting_priority, block.used

    def write(self, blocks: Iterable[Block], find: Callable[[BlockId], Block | None]) -> None:
        """Write files for blocks, and for those before them that they need, in one change of the table.

        Files of lower rank, of any store, are removed to make room. Ends with the first block that finds no room.

        Args:
            blocks: the most important first.
            find: a block in memory by its name.
        """
        done: list[Block] = []
        written: list[BlockId] = []
        try:
            with self._table.transaction():
                self._flush()
                self._total_bytes = self._table.held()[1]
                for block in blocks:
                    chain = self._without_row(block, find)
                    keep = {each.id for each in chain} | {each.parent for each in chain}
                    if not all(self._write_one(each, keep, written) for each in chain):
                        break
                    done += [block, *chain]
        except OSError:
            self._counters.failed_writes += 1
            for id in written:
                self._unlink(id)
            return
        for block in done:
            block.is_saved = True

    def remove(self, id: BlockId) -> None:
        """Remove a block."""
        key, part = id
        self._drop(row for row in [*self.find([key]).values()] if row.part == part)

    def fit(self) -> None:
        """Remove files until the limit holds."""
        with suppress(OSError), self._table.transaction():
            self._total_bytes = self._table.held()[1]
            self._make_room(0, None, frozenset())

    def _without_row(self, block: Block, find: Callable[[BlockId], Block | None]) -> list[Block]:
        """The block and those before it that have no row, from the first one on; none if one of them is lost."""
        chain: list[Block] = []
        while not self._table.has(block.id):
            chain.append(block)
            if not (block.chained and block.link.start):
                break
            before = find(block.parent)
            if before is None:
                return chain[::-1] if self._table.has(block.parent) else []
            block = before
        return chain[::-1]

    def _write_one(self, block: Block, keep: Container[BlockId], written: list[BlockId]) -> bool:
        """Write a file and its row; False if there is no room. An incomplete block of the same tokens makes way."""
        for row in self._table.neighbours(block.parent, block.link.tokens) if block.part != SNAPSHOT else ():
            if row.tokens.startswith(block.link.tokens):
                return True
            if block.link.tokens.startswith(row.tokens):
                self._drop([row])
        content = encode_block(block.id, block.arrays, self.keys)
        rank = block.lasting_priority, block.used
        if not self._make_room(len(content), rank, keep):
            return False
        link, name = block.link, file_name(block.id)
        partial = self._folder / f".{name}.partial-{os.getpid()}"
        try:
            partial.unlink(missing_ok=True)
            write_private(partial, content)
            partial.replace(self._folder / name)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        written.append(block.id)
        self._total_bytes += len(content)
        self._table.put(
            Row(
                *(link.key, block.part, link.parent, link.tokens, link.start, block.chained),
                *(*rank, len(content), self._store),
            )
        )
        self._counters.disk.bytes_in += len(content)
        return True

    def _make_room(self, size_bytes: int, rank: tuple[int, int] | None, keep: Container[BlockId]) -> bool:
        """Remove files of lower priority or earlier use, any if `rank` is None, until so many bytes more fit."""
        while self._total_bytes + size_bytes > self._limit_bytes:
            victim = next((row for row in self._table.evictable() if (row.key, row.part) not in keep), None)
            if victim is None or (rank is not None and (victim.priority, victim.used) > rank):
                return False
            self._counters.disk.evictions += 1
            self._remove([victim])
        return True

    def _drop(self, rows: Iterable[Row]) -> None:
        """Remove rows and files, with those that are of no use without them."""
        with suppress(OSError), self._table.transaction():
            for row in rows:
                self._remove([row, *self._table.descendants(row)])

    def _remove(self, rows: Sequence[Row]) -> None:
        self._table.remove((row.key, row.part) for row in rows)
        for row in rows:
            self._total_bytes -= row.size_bytes
            self._unlink((row.key, row.part))

    def _unlink(self, id: BlockId) -> None:
        with suppress(OSError):
            (self._folder / file_name(id)).unlink(missing_ok=True)

    def _flush(self) -> None:
        uses, self._uses = self._uses, {}
        if uses:
            self._table.touch((*use, *id) for id, use in uses.items())

    def _clear_remnants(self) -> None:
        """Remove files without a row, and rows without a file."""
        rows = {file_name((row.key, row.part)): row for row in self._table.rows()}
        held = {path.name for path in self._folder.iterdir() if _OWN.fullmatch(path.name)}
        for name in held - rows.keys():
            (self._folder / name).unlink(missing_ok=True)
        self._drop(row for name, row in rows.items() if name not in held)

    def _read(self, read: Callable[[], T], nothing: T) -> T:
        """What a call reads from the table; nothing if it cannot, which is said once."""
        try:
            return read()
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self._warn(f"{self._folder / INDEX} cannot be read ({error.strerror}); the cache is that in memory")
            return nothing

    def _warn(self, text: str) -> None:
        warnings.warn(f"prefix cache: {text}", PrefixWarning, stacklevel=2)
