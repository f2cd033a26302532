"""The store of reusable prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgekv.prefix.adoption import Adoption
from edgekv.prefix.block import Tier, Tokens
from edgekv.prefix.budget import Division, limits_of
from edgekv.prefix.config import StoreConfig
from edgekv.prefix.disk import open_folder
from edgekv.prefix.errors import PrefixError
from edgekv.prefix.groups import split_layers
from edgekv.prefix.index import Index
from edgekv.prefix.keys import Keys
from edgekv.prefix.lease import Lease, Match, Reuse
from edgekv.prefix.recency import now_ms
from edgekv.prefix.retention import RetentionPolicy
from edgekv.prefix.rows import ArrayRows, Rows, Source, Target, array_shape
from edgekv.prefix.stats import Counters, StoreStats
from edgekv.prefix.storage import DTYPES, BlockStorage, layout_digest
from edgekv.prefix.tiers import Tiers
from edgekv.prefix.tree import Tree, common_tokens
from edgekv.spec.geometry import Geometry, KvDtype
from edgekv.spec.layers import LayeredGeometry

_NO_POLICY = RetentionPolicy()
_ZERO_POINTS: dict[KvDtype, int] = {"u8": 128, "s8": 0, "s16": 0}


class PrefixStore:
    """Keys and values of token sequences, found by their longest common prefix. Not thread-safe.

    Rows are `[N, tokens, D]` with the tensors by layer, keys before values, by head; row t belongs to the token at
    position t, so only prefixes of sequences can be reused. If heads differ in width, use a `Source` or `Target`
    instead of an array.

    Args:
        geometry: sizes of the rows.
        config: budgets and behaviour.
        fingerprint: identifies the weights, encodings and RoPE that the bytes depend on. Required with a disk folder;
            files of another fingerprint or layout are never used.
        clock_ms: a monotonic clock in milliseconds, for the durations of retention policies.
        free_bytes: the memory that `free_memory_fraction` refers to; None asks the system.

    Raises:
        PrefixError: a budget below one block, invalid windows, an unusable folder, or a folder without a
            fingerprint.
    """

    def __init__(
        self,
        geometry: Geometry | LayeredGeometry,
        config: StoreConfig | None = None,
        *,
        fingerprint: str = "",
        clock_ms: Callable[[], int] = now_ms,
        free_bytes: int | None = None,
    ) -> None:
        config = StoreConfig() if config is None else config
        if config.disk_folder is not None and not fingerprint:
            fix = "Say what the bytes depend on, such as a hash of the weights."
            raise PrefixError("fingerprint", got="''", expected="a text, with disk_folder", fix=fix)
        self.geometry = geometry
        self.config = config
        self.fingerprint = fingerprint
        self.groups = split_layers(geometry, config.max_attention_window)
        step = config.tokens_per_block
        self._dtype = DTYPES[geometry.kv_dtype]
        division = Division.of(self.groups, geometry.context, self._dtype.itemsize, step)
        self.limits = limits_of(config, division, free_bytes)
        self._counters = Counters()
        self._digest = layout_digest(fingerprint, geometry.kv_dtype, self.groups, step)
        limited = [group.window is not None for group in self.groups]
        disk = open_folder(config, self._digest, self.groups, self._counters)
        self._keys = Keys() if disk is None else disk.keys
        self._storage = BlockStorage(
            self.groups, geometry.kv_dtype, step, self.limits, self._digest, disk, self._counters
        )
        self._tree = Tree(step, len(self.groups))
        self._tiers = Tiers(self._tree, limited, self.limits, self._storage, self._counters, clock_ms)
        reuse = Reuse(config.enable_partial_reuse, config.copy_on_partial_reuse)
        self._index = Index(self._tree, self._tiers, self.groups, step, reuse, self._counters)
        self._public: list[Tokens] = []
        self._disk = disk
        self._adoption = Adoption(self._tree, self._tiers, self._storage, self.groups, step)
        if disk is not None:
            for file in self._adoption.enter(disk.files()):
                disk.reject(file.name)
            self._tiers.fit_disk()

    def check_salt(self, salt: str | None) -> None:
        """Raise PrefixError if a salt is empty."""
        if salt == "":
            raise PrefixError("cache_salt", got="an empty text", expected="a text, or None", fix="Leave it out.")

    def match(self, tokens: Sequence[int], salt: str | None = None, adapter: str | None = None) -> Match:
        """Find and retain the longest stored prefix of a sequence; its blocks are brought into primary memory.

        Args:
            tokens: the sequence, without its last token if its logits are needed.
            salt: finds sequences inserted under the same salt, and public ones; None counts as a separate salt.
            adapter: finds what was computed with the same one; None for none.

        Raises:
            PrefixError: an empty salt.
        """
        asked = _tokens(tokens)
        key = self._root_key(salt, adapter)
        lease = Lease()
        if self.config.enable_block_reuse:
            self._adoption.follow()
            lease = self._index.match(key, asked)
            public = common_tokens(asked, self._public) if salt is not None and adapter is None else 0
            if public > lease.tokens:
                other = self._index.match(self._root_key(None), asked[:public])
                if other.tokens > lease.tokens:
                    key, lease, other = self._root_key(None), other, lease
                self._index.release(other)
        partial = lease.tokens % self.config.tokens_per_block > 0
        self._counters.count_match(len(asked), lease.tokens, partial=partial)
        return Match(key, lease)

    def fetch(self, match: Match, out: Rows | None = None) -> Rows:
        """Copy the rows of a match.

        Args:
            match: not yet released.
            out: where to, `[N, match.tokens, D]`, any strides; a new array if it is None.

        Returns:
            The rows; those outside the window of a limited group contain the zero point.

        Raises:
            ValueError: the match was released, or `out` has another shape or type.
        """
        match.check_held()
        shape = array_shape(self.groups, match.tokens)
        out = np.empty(shape, self._dtype) if out is None else out
        self._check_rows("out", out, shape)
        for group in self.groups:
            for first, stop in group.ranges:
                out[first:stop, : group.first_needed(match.tokens)] = _ZERO_POINTS[self.geometry.kv_dtype]
        self.restore(match, ArrayRows(self.groups, out))
        return out

    def restore(self, match: Match, target: Target) -> None:
        """Pass the rows of a match to a target: for each group, those of the tokens that the next one attends to.

        Raises:
            ValueError: the match was released.
        """
        match.check_held()
        step, end = self.config.tokens_per_block, match.tokens
        for number, (group, span) in enumerate(zip(self.groups, match._lease.spans, strict=False)):
            needed = group.first_needed(end)
            for token, block in enumerate(span.blocks, span.first):
                token *= step
                tokens = slice(max(needed - token, 0), min(step, end - token))
                self._storage.read(number, block.places[Tier.PRIMARY], target, token, tokens)

    def insert(
        self,
        tokens: Sequence[int],
        rows: Rows | Source,
        *,
        first: int = 0,
        prompt_tokens: int | None = None,
        retention: RetentionPolicy | None = None,
        salt: str | None = None,
        adapter: str | None = None,
        match: Match | None = None,
        ended: bool = False,
        public: bool = False,
    ) -> int:
        """Store the full blocks of a sequence. They can be matched immediately; stored blocks are not copied again.

        Stops at the first block that does not fit, or that is not stored and has no rows.

        Args:
            tokens: the sequence from its first token.
            rows: `[N, len(tokens) - first, D]` for the tokens from `first` on, or a source of rows.
            first: number of leading tokens without rows in the array; ignored for a source.
            prompt_tokens: tokens of the prompt; later ones are generated. None: all belong to the prompt.
            retention: new priorities of the blocks; None leaves stored blocks unchanged.
            salt: as in `match`.
            adapter: likewise.
            match: a match of the same salt, which then retains the stored blocks instead, so that they stay while the
                request runs. Blocks outside its limited windows are released.
            ended: whether the sequence is complete; then an incomplete last block is stored too, for partial reuse.
            public: whether calls with any salt may match this sequence, which is stored without one.

        Returns:
            Leading tokens stored now: a multiple of `tokens_per_block`, or all.

        Raises:
            PrefixError: an empty salt.
            ValueError: shapes or types that disagree, numbers out of range, a match that was released or has
                another salt.
        """
        whole = _tokens(tokens)
        prompt_tokens = len(whole) if prompt_tokens is None else prompt_tokens
        for name, value in (("first", first), ("prompt_tokens", prompt_tokens)):
            if not 0 <= value <= len(whole):
                raise ValueError(f"{name}: got {value}; expected 0 to {len(whole)}, the tokens")
        if isinstance(rows, np.ndarray):
            self._check_rows("rows", rows, array_shape(self.groups, len(whole) - first))
            rows = ArrayRows(self.groups, rows, first)
        source: Source = rows
        key = self._root_key(salt, adapter)
        if match is not None:
            match.check_held()
            if match._key != key:
                raise ValueError("match: got one of another salt; expected one of the salt of the insertion")
        if not self.config.enable_block_reuse:
            return 0
        if public and whole not in self._public:
            self._public.append(whole)
        self._adoption.follow()
        step, policy = self.config.tokens_per_block, _NO_POLICY if retention is None else retention
        nodes = self._index.insert(
            self._tree.root(key),
            whole,
            [-(-source.first(group) // step) for group in range(len(self.groups))],
            lambda index: None if policy is _NO_POLICY else policy.of(index * step, prompt_tokens),
            lambda group, block, token, tokens: self._storage.write(group, block, source, token, tokens),
            ended=ended,
        )
        upper = min(len(nodes) * step, len(whole))
        if match is not None:
            self._index.extend(match._lease, nodes, upper)
        return self._index.usable(nodes, upper)

    def block(self, block_id: int, group: int = 0) -> Rows:
        """The rows of a block in primary memory, `[tensors, tokens_per_block, D]`, in the order of `Group.names()`.

        Raises:
            ValueError: no such id.
        """
        return self._storage.view(group, block_id)

    def release(self, match: Match) -> None:
        """Release the blocks of a match; they stay in the store until evicted.

        Raises:
            ValueError: it was released before.
        """
        match.check_held()
        match._released = True
        self._index.release(match._lease)

    def save(self) -> int:
        """Write a file for every block that may be offloaded, highest priority first, until the disk limit is reached.

        Blocks stay in memory. A store that is opened on the folder later starts with these files.

        Returns:
            Total number of blocks that have a file now.
        """
        self._adoption.follow()
        self._tiers.recency.expire()
        blocks = [
            block
            for block in self._tree.blocks()
            if not block.is_in(Tier.DISK) and block.priority >= self.config.secondary_offload_min_priority
        ]
        try:
            with self._storage.transaction():
                for block in sorted(blocks, key=lambda block: (block.priority, block.stamp), reverse=True):
                    if not self._tiers.save(block, displace=False):
                        break
                self._storage.flush()
        except OSError:
            self._counters.failed_writes += 1
        return self._tiers.disk_blocks

    def close(self) -> None:
        """Write the last uses of files to the folder's index and close it; the store must not be used after it."""
        if self._disk is not None:
            self._storage.flush()
            self._disk.close()

    @property
    def stats(self) -> StoreStats:
        """Counters, and the current content."""
        return self._counters.snapshot(*self._tiers.held())

    def _root_key(self, salt: str | None, adapter: str | None = None) -> bytes:
        self.check_salt(salt)
        return self._keys.root(self._digest, salt, adapter)

    def _check_rows(self, field: str, rows: Rows, shape: tuple[int, int, int]) -> None:
        if rows.shape != shape or rows.dtype != self._dtype:
            raise ValueError(f"{field}: got {rows.dtype} {list(rows.shape)}; expected {self._dtype} {list(shape)}")


def _tokens(tokens: Sequence[int]) -> Tokens:
    return tuple(tokens.tolist()) if isinstance(tokens, np.ndarray) else tuple(tokens)
