"""The folder: block files, and the table of them."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from edgekv.errors import EdgeKVWarning, PrefixError
from edgekv.machine.private_file import NotPrivateError, check_folder, make_folder, read_private, write_private
from edgekv.prefix.block import SNAPSHOT, Arrays, Block, BlockId, decode_block, encode_block
from edgekv.prefix.keys import Keys
from edgekv.prefix.stats import StoreStats
from edgekv.prefix.table import INDEX, LOCKED, Row, Table, file_name

_OWN = re.compile(r"\.?[0-9a-f]{32}-(?:g\d+|s)\.safetensors(?:\.partial-\d+)?")
_OLD_INDEX = "index.sqlite"  # of the format before this one


class Disk:
    """Block files, written atomically and verified before use, below a limit for all processes and models.

    A file is written, and files are removed, while the table is locked. Whatever a killed process left between a file
    and its row is cleared when the folder is opened.

    Attributes:
        keys: keyed hashes with the folder's secret.
        last_used: the latest use of any block when the folder was opened.
    """

    def __init__(self, folder: Path, limit_bytes: int, store: str, counters: StoreStats) -> None:
        """Open a folder; create it and its table if they are missing. `store` names the model in listings.

        Raises:
            PrefixError: the folder cannot be used, is of another format, or is writable by other users.
        """
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._store = store
        self._counters = counters
        self._uses: dict[BlockId, tuple[int, int]] = {}
        self._total_bytes = 0  # of all files, while the table is locked for writing
        self._version: object = None
        self._held = 0, 0
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
            self.last_used = self._table.last_used()
        except NotPrivateError as error:
            fix = f"Give a folder of your own, and remove others' access: chmod -R go-rwx {folder}"
            expected = "a file or folder that only you can write"
            raise PrefixError(f"disk_folder {error.filename}", got=error.strerror, expected=expected, fix=fix) from None
        except OSError as error:
            expected, fix = "a writable folder", "Give a folder that you can write."
            if LOCKED in str(error):
                expected = "a table that no other process is writing"
                fix = "Wait until the other process has written its blocks, and try again."
            raise PrefixError(f"disk_folder {folder}", got=error.strerror, expected=expected, fix=fix) from None
        self.keys = Keys(self._table.secret)

    def close(self) -> None:
        """Write the last uses of blocks to the table, and close it."""
        with suppress(OSError):
            self._flush()
        self._table.close()

    def rows(self, query: Callable[[Table], list[Row]]) -> list[Row]:
        """What a query of the table finds; nothing if the table cannot be read, which is said once."""
        try:
            return query(self._table)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                text = f"prefix cache: {self._folder / INDEX} cannot be read ({error.strerror}); memory alone is used"
                warnings.warn(text, EdgeKVWarning, stacklevel=2)
            return []

    def held(self) -> tuple[int, int]:
        """Files and bytes of this store; the table is summed up only after a change."""
        with suppress(OSError):
            if self._version != (version := self._table.version):
                self._version, self._held = version, self._table.held(self._store)
        return self._held

    def load(self, row: Row, is_right: Callable[[Arrays], bool]) -> Arrays | None:
        """The verified arrays of a block; None if the file is gone, was rejected and removed, or cannot be read now.

        `is_right` checks names, types and shapes, which a valid checksum does not.
        """
        arrays, is_there = None, False
        try:
            arrays, is_there = self._read(row, is_right)
            if arrays is None:
                # Another process may have removed the file and written it again: look once more while none can.
                with self._table.transaction():
                    arrays, is_there = self._read(row, is_right)
                    if arrays is None:
                        self._remove([row])
        except OSError:
            is_there = True
        self._counters.rejected_files += arrays is None and is_there
        if arrays is not None:
            self._counters.disk.bytes_out += row.size_bytes
        return arrays

    def used(self, blocks: Iterable[Block]) -> None:
        """Record the last use of blocks, which may have files."""
        self._uses.update({block.id: (block.lasting_priority, block.used) for block in blocks if block.is_saved})

    def write(self, blocks: Iterable[Block], find: Callable[[BlockId], Block | None]) -> None:
        """Write files for blocks, and for those before them that they need, in one change of the table.

        Files of lower rank, of any store, are removed to make room. Ends with the first block that finds no room;
        the most important one comes first. `find` has the blocks in memory.
        """
        done: list[Block] = []
        written: list[BlockId] = []
        try:
            with self._table.transaction():
                self._flush()
                self._total_bytes = self._table.held()[1]
                self._make_room(0, None, frozenset())
                for block in blocks:
                    chain = self._without_row(block, find)
                    keep = {block.id for block in chain} | {block.parent for block in chain}
                    if not all(self._write_one(block, keep, written) for block in chain):
                        break
                    done += [block, *chain]
        except OSError:
            self._counters.failed_writes += 1
            with suppress(OSError), self._table.transaction():  # another process may have written the same since
                for id in written:
                    if not self._table.has(id):
                        self._unlink(file_name(id))
            return
        for block in done:
            block.is_saved = True

    def _read(self, row: Row, is_right: Callable[[Arrays], bool]) -> tuple[Arrays | None, bool]:
        """The verified arrays of a block, or None; and whether there is a file. OSError if it cannot be read now."""
        try:
            content = read_private(self._folder / row.file, row.size_bytes + 1)
        except FileNotFoundError:
            return None, False
        except NotPrivateError:
            return None, True
        arrays = decode_block((row.key, row.part), content, self.keys)
        return arrays if arrays is not None and is_right(arrays) else None, True

    def drop(self, rows: Sequence[Row]) -> None:
        """Remove blocks. Those after them are found again when these are."""
        with suppress(OSError), self._table.transaction():
            self._remove(rows)

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
                self._remove([row])
        content = encode_block(block.id, block.arrays, self.keys)
        rank = block.lasting_priority, block.used
        if not self._make_room(len(content), rank, keep):
            return False
        row = Row(
            *(block.link.key, block.part, block.link.parent, block.link.tokens, block.link.start, block.chained),
            *(*rank, len(content), self._store),
        )
        partial = self._folder / f".{row.file}.partial-{os.getpid()}"
        try:
            partial.unlink(missing_ok=True)
            write_private(partial, content)
            partial.replace(self._folder / row.file)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        written.append(block.id)
        self._total_bytes += len(content)
        self._table.put(row)
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

    def _remove(self, rows: Sequence[Row]) -> None:
        self._table.remove(rows)
        for row in rows:
            self._total_bytes -= row.size_bytes
            self._unlink(row.file)

    def _unlink(self, name: str) -> None:
        with suppress(OSError):
            (self._folder / name).unlink(missing_ok=True)

    def _flush(self) -> None:
        uses, self._uses = self._uses, {}
        if uses:
            self._table.touch((*use, *id) for id, use in uses.items())

    def _clear_remnants(self) -> None:
        """Remove files without a row, and rows without a file."""
        rows = {row.file: row for row in self._table.rows()}
        held = {path.name for path in self._folder.iterdir() if _OWN.fullmatch(path.name)}
        for name in held - rows.keys():
            (self._folder / name).unlink(missing_ok=True)
        self._remove([row for name, row in rows.items() if name not in held])
