"""The bytes of all tiers; executes what `Tiers` decides."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgekv.prefix.block import MEMORY, Block, Tier
from edgekv.prefix.blockfile import BlockRecord
from edgekv.prefix.disk import DiskFolder
from edgekv.prefix.groups import Group
from edgekv.prefix.memory import BlockMemory
from edgekv.prefix.retention import DEFAULT_PRIORITY
from edgekv.prefix.rows import Rows, Source, Target
from edgekv.prefix.stats import Counters
from edgekv.prefix.tiers import Limits
from edgekv.prefix.tree import Root
from edgekv.spec.geometry import KvDtype

DTYPES: dict[KvDtype, np.dtype[Any]] = {"u8": np.dtype(np.uint8), "s8": np.dtype(np.int8), "s16": np.dtype(np.int16)}


def layout_digest(fingerprint: str, kv_dtype: KvDtype, groups: Sequence[Group], step: int) -> bytes:
    """What must be equal for a block's bytes to mean the same: the caller's fingerprint and the block's layout."""
    layers = [(group.window, group.kv_heads, group.head_dim, group.layers) for group in groups]
    said = (fingerprint, kv_dtype, step, layers)
    return hashlib.blake2b(repr(said).encode(), digest_size=16).digest()


class BlockStorage:
    """Primary and host memory of each group, and the folder.

    Args:
        groups: what the blocks hold.
        kv_dtype: type of an element.
        step: tokens of a block.
        limits: blocks of each memory.
        digest: see `layout_digest`.
        disk: the folder, if there is one.
        counters: counts the bytes.
    """

    def __init__(
        self,
        groups: Sequence[Group],
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

    def block_bytes(self, group: int) -> int:
        """Bytes of one block in memory."""
        return self._memories[Tier.PRIMARY][group].block_bytes

    def view(self, group: int, block: int) -> Rows:
        """One block of primary memory, `[tensors, tokens_per_block, D]`."""
        return self._memories[Tier.PRIMARY][group].view(block)

    def write(self, group: int, block: int, source: Source, token: int, tokens: int) -> None:
        """Fill a block of primary memory with the rows of `tokens` tokens, beginning with `token`."""
        rows = self.view(group, block)[:, :tokens]
        source.read(group, token, rows)
        self._counters.bytes_in[Tier.PRIMARY] += rows.nbytes

    def read(self, group: int, block: int, target: Target, token: int, tokens: slice) -> None:
        """Give some rows of a block of primary memory to a target; the block begins with `token`."""
        rows = self.view(group, block)[:, tokens]
        target.write(group, token + tokens.start, rows)
        self._counters.bytes_out[Tier.PRIMARY] += rows.nbytes

    def move(self, group: int, source: Tier, source_id: int, target: Tier, target_id: int) -> None:
        self._memories[target][group].view(target_id)[...] = self._memories[source][group].view(source_id)
        self._count_move(group, source, target)

    def swap(self, group: int, primary_id: int, host_id: int) -> None:
        primary, host = self.view(group, primary_id), self._memories[Tier.HOST][group].view(host_id)
        aside = primary.copy()
        primary[...] = host
        host[...] = aside
        self._count_move(group, Tier.PRIMARY, Tier.HOST)
        self._count_move(group, Tier.HOST, Tier.PRIMARY)

    def encode(self, block: Block, tier: Tier) -> bytes:
        assert self._disk is not None
        held = self._memories[tier][block.group].view(block.places[tier])
        rows = np.ascontiguousarray(held[:, : len(block.node.tokens)])
        self._counters.bytes_out[tier] += rows.nbytes
        return self._disk.encode(self._record(block), rows)

    def write_file(self, block: Block, data: bytes) -> bool:
        assert self._disk is not None
        written = self._disk.write(self._record(block), data)
        self._counters.bytes_in[Tier.DISK] += len(data) if written else 0
        return written

    def load(self, block: Block, primary_id: int) -> bool:
        assert self._disk is not None
        rows = self._disk.read(self._record(block))
        if rows is None:
            return False
        self.view(block.group, primary_id)[:, : rows.shape[1]] = rows
        self._counters.bytes_out[Tier.DISK] += block.places[Tier.DISK]
        self._counters.bytes_in[Tier.PRIMARY] += rows.nbytes
        return True

    def remove_file(self, block: Block) -> None:
        assert self._disk is not None
        self._disk.remove(self._record(block))

    def _count_move(self, group: int, source: Tier, target: Tier) -> None:
        self._counters.bytes_out[source] += self.block_bytes(group)
        self._counters.bytes_in[target] += self.block_bytes(group)

    def _record(self, block: Block) -> BlockRecord:
        root, *nodes = block.node.path()
        assert isinstance(root, Root)
        tokens = tuple(token for node in nodes for token in node.tokens)
        lasting = block.priority if block.expires_ms is None else DEFAULT_PRIORITY
        return BlockRecord(self._digest, block.group, root.key, tokens, lasting)
