"""The bytes of all tiers; carries out the decisions of `Tiers`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import numpy as np

from edgekv.prefix.block import MEMORY, Block, Tier
from edgekv.prefix.blockfile import BlockRecord
from edgekv.prefix.budget import Limits
from edgekv.prefix.disk import DiskFolder, FoundFile
from edgekv.prefix.groups import BlockGroup
from edgekv.prefix.retention import DEFAULT_PRIORITY
from edgekv.prefix.rows import Rows, Source, Target
from edgekv.prefix.stats import Counters
from edgekv.prefix.tree import Root
from edgekv.spec.geometry import KvDtype

_SLAB_BYTES = 1 << 26
DTYPES: dict[KvDtype, np.dtype[Any]] = {"u8": np.dtype(np.uint8), "s8": np.dtype(np.int8), "s16": np.dtype(np.int16)}


def layout_digest(fingerprint: str, kv_dtype: KvDtype, groups: Sequence[BlockGroup], step: int) -> bytes:
    """Digest of the fingerprint and the block's layout, which determine the meaning of a block's bytes."""
    layers = [(group.window, group.kv_heads, group.head_dim, group.layers) for group in groups]
    said = (fingerprint, kv_dtype, step, layers)
    return hashlib.blake2b(repr(said).encode(), digest_size=16).digest()


class BlockMemory:
    """Blocks `[tensors, tokens_per_block, D]` by id, allocated in slabs as ids come into use.

    Attributes:
        block_bytes: bytes of one block.
        bytes_held: bytes of all slabs so far.
    """

    def __init__(self, shape: tuple[int, int, int], dtype: np.dtype[Any], capacity: int) -> None:
        self.block_bytes = int(np.prod(shape)) * dtype.itemsize
        self.bytes_held = 0
        self._shape = shape
        self._dtype = dtype
        self._capacity = capacity
        self._per_slab = max(1, _SLAB_BYTES // self.block_bytes)
        self._slabs: dict[int, Rows] = {}

    def view(self, block: int) -> Rows:
        """One block, sharing the pool's memory.

        Raises:
            ValueError: no such id.
        """
        if not 0 <= block < self._capacity:
            raise ValueError(f"block: got {block}; expected 0 to {self._capacity - 1}")
        number, place = divmod(block, self._per_slab)
        slab = self._slabs.get(number)
        if slab is None:
            blocks = min(self._per_slab, self._capacity - number * self._per_slab)
            slab = self._slabs[number] = np.empty((blocks, *self._shape), self._dtype)
            self.bytes_held += slab.nbytes
        return slab[place]  # type: ignore[no-any-return]


class BlockStorage:
    """Primary and host memory of each group, and the folder.

    Args:
        groups: groups of layers, one pool each.
        kv_dtype: element type.
        step: tokens per block.
        limits: blocks of each memory.
        digest: see `layout_digest`.
        disk: the folder, or None.
        counters: counts the bytes.
    """

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        kv_dtype: KvDtype,
        step: int,
        limits: Limits,
        digest: bytes,
        disk: DiskFolder | None,
        counters: Counters,
    ) -> None:
        dtype = DTYPES[kv_dtype]
        shapes = [(group.tensors, step, group.head_dim) for group in groups]
        self._memories = {
            tier: [BlockMemory(shape, dtype, blocks) for shape, blocks in zip(shapes, capacity, strict=True)]
            for tier, capacity in zip(MEMORY, (limits.primary, limits.host), strict=True)
        }
        self._step = step
        self._digest = digest
        self._disk = disk
        self._counters = counters
        self._files: dict[str, Block] = {}
        self._names: dict[Block, str] = {}
        self._touched: set[Block] = set()

    def block_bytes(self, group: int) -> int:
        """Bytes of one block in memory."""
        return self._memories[Tier.PRIMARY][group].block_bytes

    def view(self, group: int, block: int) -> Rows:
        """One block of primary memory, `[tensors, tokens_per_block, D]`."""
        return self._memories[Tier.PRIMARY][group].view(block)

    def write(self, group: int, block: int, source: Source, token: int, tokens: int) -> None:
        """Fill a block of primary memory with the rows of `tokens` tokens, starting at `token`."""
        rows = self.view(group, block)[:, :tokens]
        source.read(group, token, rows)
        self._counters.bytes_in[Tier.PRIMARY] += rows.nbytes

    def read(self, group: int, block: int, target: Target, token: int, tokens: slice) -> None:
        """Pass some rows of a block of primary memory to a target; the block starts at `token`."""
        rows = self.view(group, block)[:, tokens]
        target.write(group, token + tokens.start, rows)
        self._counters.bytes_out[Tier.PRIMARY] += rows.nbytes

    def move(self, group: int, source: Tier, source_id: int, target: Tier, target_id: int) -> None:
        """Copy a block between the memories."""
        self._memories[target][group].view(target_id)[...] = self._memories[source][group].view(source_id)
        self._count_move(group, source, target)

    def swap(self, group: int, primary_id: int, host_id: int) -> None:
        """Exchange a block of primary memory and one of host memory."""
        primary, host = self.view(group, primary_id), self._memories[Tier.HOST][group].view(host_id)
        saved = primary.copy()
        primary[...] = host
        host[...] = saved
        self._count_move(group, Tier.PRIMARY, Tier.HOST)
        self._count_move(group, Tier.HOST, Tier.PRIMARY)

    def encode(self, block: Block, tier: Tier) -> bytes:
        """The file content for a block in this memory."""
        assert self._disk is not None
        held = self._memories[tier][block.group].view(block.places[tier])
        rows = np.ascontiguousarray(held[:, : len(block.node.tokens)])
        self._counters.bytes_out[tier] += rows.nbytes
        return self._disk.encode(self._record(block), rows)

    def write_file(self, block: Block, data: bytes, evicted: Callable[[Block], None], *, displace: bool) -> bool:
        """Write a block's file atomically; False if the disk refuses it.

        Files are removed to make room, and `evicted` is called for each that belongs to a block of this store.
        Without `displace`, only files of lower rank than the block are removed.
        """
        assert self._disk is not None
        limit = None if displace else (block.priority, block.used_ns)
        try:
            with self._disk.transaction():
                self.flush()
                if not self._make_room(len(data), limit, evicted):
                    return False
                record = self._record(block)
                if not self._disk.write(record, data, block.used_ns):
                    return False
        except OSError:
            self._counters.failed_writes += 1
            return False
        self.enter_file(block, record.name(self._disk.keys))
        self._counters.bytes_in[Tier.DISK] += len(data)
        return True

    def fit_disk(self, evicted: Callable[[Block], None]) -> None:
        """Evict files until the limit holds."""
        if self._disk is not None:
            with suppress(OSError):
                self._make_room(0, None, evicted)

    def load(self, block: Block, primary_id: int) -> bool:
        """Read a block's file into primary memory; False if it is gone or was rejected."""
        assert self._disk is not None
        rows = self._disk.read(self._record(block))
        if rows is None:
            self._forget(block)
            return False
        self.view(block.group, primary_id)[:, : rows.shape[1]] = rows
        self._counters.bytes_out[Tier.DISK] += block.places[Tier.DISK]
        self._counters.bytes_in[Tier.PRIMARY] += rows.nbytes
        return True

    def remove_file(self, block: Block) -> None:
        """Remove a block's file."""
        assert self._disk is not None
        if block in self._names:
            self._disk.remove([self._names[block]])
            self._forget(block)

    def transaction(self) -> AbstractContextManager[None]:
        """Write files in one transaction of the index, which costs one flush instead of many."""
        return nullcontext() if self._disk is None else self._disk.transaction()

    def used(self, block: Block) -> None:
        """Record that a block was used; it may have a file."""
        if block in self._names:
            self._touched.add(block)

    def enter_file(self, block: Block, name: str) -> None:
        """Record which block a file belongs to."""
        self._files[name], self._names[block] = block, name

    def flush(self) -> None:
        """Write the last uses of files to the index, which all processes use for eviction."""
        if self._disk is not None and self._touched:
            self._disk.touch(
                [
                    (self._names[block], _lasting(block), block.used_ns)
                    for block in self._touched
                    if block in self._names
                ]
            )
            self._touched.clear()

    def changed_files(self) -> tuple[list[FoundFile], list[Block]] | None:
        """Files that other processes have written, and blocks whose files they have removed; None if there are none."""
        if self._disk is None or not self._disk.is_changed():
            return None
        try:
            found = {file.name: file for file in self._disk.files()}
        except OSError:
            return None
        gone = [block for name, block in self._files.items() if name not in found]
        for block in gone:
            self._forget(block)
        return [file for name, file in found.items() if name not in self._files], gone

    def _make_room(self, size_bytes: int, limit: tuple[int, int] | None, evicted: Callable[[Block], None]) -> bool:
        assert self._disk is not None

        def keep(name: str) -> bool:
            return name in self._files and self._files[name].guards > 0

        def forget(name: str) -> None:
            block = self._files.get(name)
            if block is not None:
                self._forget(block)
                evicted(block)

        return self._disk.make_room(size_bytes, limit, keep, forget)

    def _forget(self, block: Block) -> None:
        name = self._names.pop(block, None)
        if name is not None:
            del self._files[name]
        self._touched.discard(block)

    def _count_move(self, group: int, source: Tier, target: Tier) -> None:
        self._counters.bytes_out[source] += self.block_bytes(group)
        self._counters.bytes_in[target] += self.block_bytes(group)

    def _record(self, block: Block) -> BlockRecord:
        root, *nodes = block.node.path()
        assert isinstance(root, Root)
        tokens = tuple(token for node in nodes for token in node.tokens)
        return BlockRecord(self._digest, block.group, root.key, tokens, _lasting(block))


def _lasting(block: Block) -> int:
    """The priority of a file: one that expires is not visible to other processes."""
    return block.priority if block.expires_ms is None else DEFAULT_PRIORITY
