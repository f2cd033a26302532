"""The store of reusable prefixes: what a request calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from edgekv.kv.geometry import Geometry
from edgekv.prefix.block import Block, Tier
from edgekv.prefix.budget import Budget, Division, free_memory_bytes, primary_budget
from edgekv.prefix.config import StoreConfig
from edgekv.prefix.disk import DiskFolder, FoundFile
from edgekv.prefix.errors import PrefixError
from edgekv.prefix.groups import split_layers
from edgekv.prefix.index import Index, Lease, Reuse
from edgekv.prefix.keys import Keys
from edgekv.prefix.memory import Rows
from edgekv.prefix.retention import RetentionPolicy
from edgekv.prefix.stats import Counters, StoreStats
from edgekv.prefix.storage import DTYPES, BlockStorage, layout_digest
from edgekv.prefix.tiers import Limits, Tiers
from edgekv.prefix.tree import Node, Tokens, Tree

_NO_POLICY = RetentionPolicy()


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Match:
    """What was found of a sequence. It holds its blocks until `PrefixStore.release`.

    Attributes:
        tokens: how many tokens from the beginning on were found.
    """

    __slots__ = ("_key", "_lease", "_released")

    def __init__(self, key: bytes, lease: Lease) -> None:
        self._key = key
        self._lease = lease
        self._released = False

    @property
    def tokens(self) -> int:
        return self._lease.tokens


class PrefixStore:
    """Keys and values of token sequences, found again by their longest common beginning. Not for several threads.

    Rows are `[N, tokens, D]` with the tensors in the order of `Geometry.names()`; row t belongs to the token at
    position t, so that only beginnings of sequences can be reused.

    Args:
        geometry: sizes of the rows.
        config: budgets and behaviour.
        clock_ms: a clock that only goes forward, in milliseconds, for the durations of retention policies.
        free_bytes: memory of which `free_memory_fraction` is taken; None asks the system.

    Raises:
        PrefixError: a budget below one block, windows that cannot be, or a folder that cannot be used.
    """

    def __init__(
        self,
        geometry: Geometry,
        config: StoreConfig | None = None,
        *,
        clock_ms: Callable[[], int] = _now_ms,
        free_bytes: int | None = None,
    ) -> None:
        config = StoreConfig() if config is None else config
        self.geometry = geometry
        self.config = config
        self.groups = split_layers([geometry.kv_heads] * geometry.layers, config.max_attention_window, geometry.context)
        step = config.tokens_per_block
        division = Division.of(self.groups, geometry, step)
        budget = primary_budget(config, division, free_memory_bytes() if free_bytes is None else free_bytes)
        host = division.blocks(Budget("host_cache_size", config.host_cache_size)) if config.host_cache_size else None
        self.limits = Limits(
            primary=division.blocks(budget),
            host=host or (0,) * len(self.groups),
            disk_bytes=0 if config.disk_folder is None else config.disk_cache_size,
            offload_min_priority=config.secondary_offload_min_priority,
        )
        self._counters = Counters()
        self._digest = layout_digest(config.fingerprint, geometry, self.groups, step)
        disk = None if config.disk_folder is None else DiskFolder(config.disk_folder, self._counters)
        self._keys = Keys() if disk is None else disk.keys
        self._storage = BlockStorage(self.groups, geometry, step, self.limits, self._digest, disk, self._counters)
        self._tree = Tree(step, len(self.groups))
        limited = [group.window is not None for group in self.groups]
        self._tiers = Tiers(self._tree, limited, self.limits, self._storage, self._counters, clock_ms)
        reuse = Reuse(config.enable_partial_reuse, config.copy_on_partial_reuse)
        self._index = Index(self._tree, self._tiers, self.groups, step, reuse, self._counters)
        if disk is not None:
            self._adopt(disk)

    def match(self, tokens: Sequence[int], salt: str | None = None) -> Match:
        """Find and hold the longest stored beginning of a sequence; blocks of lower tiers come back for it.

        A loop that needs the logits of the last token asks for all tokens but that one.

        Args:
            tokens: the sequence.
            salt: only what was inserted under an equal salt is found; None is a salt of its own.

        Raises:
            PrefixError: an empty salt.
        """
        asked = _tokens(tokens)
        key = self._root_key(salt)
        lease = self._index.match(key, asked) if self.config.enable_block_reuse else Lease()
        partial = lease.tokens % self.config.tokens_per_block > 0
        self._counters.count_match(len(asked), lease.tokens, partial=partial)
        return Match(key, lease)

    def fetch(self, match: Match, out: Rows | None = None) -> Rows:
        """Copy the rows of a match.

        Args:
            match: not yet released.
            out: where to, `[N, match.tokens, D]`, any strides; a new array if it is None.

        Returns:
            The rows. Those that have left the window of a limited group hold the zero point.

        Raises:
            ValueError: the match was released, or `out` has another shape or type.
        """
        self._check_held(match)
        shape = (self.geometry.tensors, match.tokens, self.geometry.head_dim)
        out = np.empty(shape, self._dtype) if out is None else out
        self._check_rows("out", out, shape)
        step = self.config.tokens_per_block
        for number, (group, span) in enumerate(zip(self.groups, match._lease.spans, strict=False)):
            for first, stop in group.ranges:
                out[first:stop, : span.first * step] = self.geometry.zero_point
            for index, block in enumerate(span.blocks, span.first):
                self._storage.read(number, block.places[Tier.PRIMARY], out, index * step)
        return out

    def insert(
        self,
        tokens: Sequence[int],
        rows: Rows,
        *,
        first: int = 0,
        prompt_tokens: int | None = None,
        retention: RetentionPolicy | None = None,
        salt: str | None = None,
        match: Match | None = None,
    ) -> int:
        """Store the whole blocks of a sequence; they can be matched at once. What is stored already is not copied.

        Insertion ends at the first block for which there is no room, or neither a stored block nor rows.

        Args:
            tokens: the sequence from its beginning on.
            rows: `[N, len(tokens) - first, D]`, of the tokens from `first` on.
            first: tokens whose rows the caller does not have.
            prompt_tokens: tokens of the prompt; those behind are generated. None: all are of the prompt.
            retention: priorities of the blocks from now on; None leaves stored blocks as they are.
            salt: as in `match`.
            match: a match of the same salt that holds the stored blocks from now on instead of what it found, so
                that they stay while the request runs. Blocks that its limited windows have left are given back.

        Returns:
            How many tokens from the beginning on are stored now, a multiple of `tokens_per_block`.

        Raises:
            PrefixError: an empty salt.
            ValueError: shapes or types that disagree, numbers out of range, a match that was released or has
                another salt.
        """
        whole = _tokens(tokens)
        prompt_tokens = len(whole) if prompt_tokens is None else prompt_tokens
        for name, value in (("first", first), ("prompt_tokens", prompt_tokens)):
            if not 0 <= value <= len(whole):
                raise ValueError(f"{name}: found {value}; wanted 0 to {len(whole)}, the tokens")
        self._check_rows("rows", rows, (self.geometry.tensors, len(whole) - first, self.geometry.head_dim))
        key = self._root_key(salt)
        if match is not None:
            self._check_held(match)
            if match._key != key:
                raise ValueError("match: found one of another salt; wanted one of the salt of the insertion")
        if not self.config.enable_block_reuse:
            return 0
        step = self.config.tokens_per_block
        policy = _NO_POLICY if retention is None else retention
        nodes = self._index.insert(
            self._tree.root(key),
            whole,
            -(-first // step),
            lambda index: None if policy is _NO_POLICY else policy.of(index * step, prompt_tokens),
            lambda group, block, index: self._storage.write(group, block, rows, index * step - first),
        )
        if match is not None:
            self._index.extend(match._lease, nodes)
        return self._index.usable(nodes, len(nodes) * step)

    def release(self, match: Match) -> None:
        """Give back the blocks of a match; they stay in the store until they are evicted.

        Raises:
            ValueError: it was released before.
        """
        self._check_held(match)
        match._released = True
        self._index.release(match._lease)

    def save(self) -> int:
        """Write a file of every block in memory that is worth offloading, the dearest first, as far as the disk goes.

        Blocks stay in memory. A store that is opened on the folder later begins with what is there.

        Returns:
            Blocks that have a file now, in all.
        """
        self._tiers.expire()
        blocks = [
            block
            for root in self._tree.roots.values()
            for node in root.subtree()
            for block in node.blocks
            if block is not None
            and not block.is_in(Tier.DISK)
            and block.priority >= self.config.secondary_offload_min_priority
        ]
        for block in sorted(blocks, key=lambda block: (block.priority, block.stamp), reverse=True):
            if not self._tiers.save(block, displace=False):
                break
        return self._tiers.disk_blocks

    @property
    def stats(self) -> StoreStats:
        """What was done so far and what is held."""
        used, held = [0, 0, self._tiers.disk_blocks], [0, 0, self._tiers.disk_bytes]
        for tier, pools in self._tiers.pools.items():
            for group, pool in enumerate(pools):
                used[tier] += pool.used
                held[tier] += pool.used * self._storage.block_bytes(group)
        return self._counters.snapshot(used, held)

    @property
    def _dtype(self) -> np.dtype[np.generic]:
        return DTYPES[self.geometry.kv_dtype]

    def _root_key(self, salt: str | None) -> bytes:
        if salt == "":
            raise PrefixError("cache_salt", found="an empty text", wanted="a text, or None", way_out="Leave it out.")
        return self._keys.root(self._digest, salt)

    def _check_held(self, match: Match) -> None:
        if match._released:
            raise ValueError("match: found one that was released; wanted one that is held")

    def _check_rows(self, field: str, rows: Rows, shape: tuple[int, int, int]) -> None:
        if rows.shape != shape or rows.dtype != self._dtype:
            found = f"{rows.dtype} {list(rows.shape)}"
            raise ValueError(f"{field}: found {found}; wanted {self._dtype} {list(shape)}")

    def _adopt(self, disk: DiskFolder) -> None:
        """Enter the files of earlier stores, beginnings before what follows them, in the order of their last use."""
        found = disk.scan(self._digest)
        entered: dict[int, Block] = {}
        for order in sorted(range(len(found)), key=lambda i: len(found[i].record.tokens)):
            block = self._enter(found[order])
            if block is None:
                disk.reject(found[order].record)
            else:
                entered[order] = block
        self._tiers.guard(entered.values())
        for order in sorted(entered):
            self._tiers.touch(entered[order])
        self._tiers.unguard(entered.values())
        self._tiers.fit_disk()

    def _enter(self, file: FoundFile) -> Block | None:
        """The block of a file, or None if it is of no use without others that are not there."""
        record, step = file.record, self.config.tokens_per_block
        if record.group >= len(self.groups) or not record.tokens or len(record.tokens) % step:
            return None
        root = self._tree.root(record.root)
        node: Node = root
        for start in range(0, len(record.tokens), step):
            node = self._tree.child(node, record.tokens[start : start + step])
        needs_parent = self.groups[record.group].window is None and node.parent is not root
        if needs_parent and (node.parent is None or node.parent.blocks[record.group] is None):
            return None
        block = node.blocks[record.group] = Block(node, record.group, record.priority)
        self._tree.attach(node)
        self._tiers.place(block, Tier.DISK, file.file_bytes)
        return block


def _tokens(tokens: Sequence[int]) -> Tokens:
    return tuple(tokens.tolist()) if isinstance(tokens, np.ndarray) else tuple(tokens)
