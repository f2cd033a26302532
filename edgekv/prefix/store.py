"""The store of reusable prefixes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgekv.errors import PrefixError
from edgekv.kv.arena import DTYPES
from edgekv.prefix.block import ROWS, SNAPSHOT, Arrays, Block, BlockId, IsPinned, Memory, now_ms
from edgekv.prefix.config import StoreConfig
from edgekv.prefix.disk import Disk
from edgekv.prefix.keys import TOKEN_BYTES, Keys, Link, common_tokens, tail, token_bytes
from edgekv.prefix.retention import RetentionPolicy
from edgekv.prefix.rows import Rows, Source, Target, split_layers
from edgekv.prefix.stats import StoreStats
from edgekv.prefix.table import Row
from edgekv.spec.layers import Geometry


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The states of a model's recurrent layers after a number of tokens; the store does not look into them.

    Attributes:
        tokens: of the sequence, from its first one.
        arrays: by name.
    """

    tokens: int
    arrays: Arrays


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """A stored prefix of a sequence; it stays valid when its blocks are evicted.

    Attributes:
        tokens: length of the prefix.
        rows: for each group, the rows of its blocks that the next token attends to, each `[tensors, tokens, D]`.
        states: the block with the states after the prefix; None if the model has none.
    """

    tokens: int = 0
    rows: tuple[tuple[Rows, ...], ...] = ()
    states: Block | None = None


class PrefixStore:
    """Keys and values of token sequences, found by their longest common prefix. Not thread-safe.

    Row t belongs to the token at position t, so only prefixes of sequences can be reused.

    A model with recurrent layers has states, which are known at few positions. With `snapshots`, a match ends where
    the store has both the rows and a `Snapshot`.

    Args:
        geometry: sizes of the rows.
        config: budgets and behaviour.
        fingerprint: identifies the weights, encodings and RoPE that the bytes depend on, and the layout of the
            snapshots. Required with a disk folder; blocks of another fingerprint or layout are never found.
        snapshots: whether a prefix is of use only with a snapshot at its end.
        clock_ms: a monotonic clock in milliseconds, for the durations of retention policies.

    Raises:
        PrefixError: a budget below one block, an unusable folder, or a folder without a fingerprint.
    """

    def __init__(
        self,
        geometry: Geometry,
        config: StoreConfig | None = None,
        *,
        fingerprint: str = "",
        snapshots: bool = False,
        clock_ms: Callable[[], int] = now_ms,
    ) -> None:
        config = StoreConfig() if config is None else config
        if config.disk_folder is not None and not fingerprint:
            fix = "Say what the bytes depend on, such as a hash of the weights."
            raise PrefixError("fingerprint", got="''", expected="a text, with disk_folder", fix=fix)
        self.geometry = geometry
        self.config = config
        self.fingerprint = fingerprint
        self.groups = split_layers(geometry)
        self.snapshots = snapshots
        self.counters = StoreStats()
        self._step = config.tokens_per_block
        self._parts = range(len(self.groups))
        self._dtype = np.dtype(DTYPES[geometry.kv_dtype])
        # What determines the meaning of a block's bytes, and its size.
        said = repr((fingerprint, self.groups, self._step, snapshots))
        self._layout = hashlib.blake2b(said.encode(), digest_size=16).digest()
        budget_bytes = config.memory_bytes(self.groups, geometry.context)
        self._disk: Disk | None = None
        if config.disk_folder is not None:
            self._disk = Disk(config.disk_folder, config.disk_cache_size, self._layout.hex()[:16], self.counters)
        self._memory = Memory(budget_bytes, clock_ms, 0 if self._disk is None else self._disk.last_used)
        self._keys = Keys() if self._disk is None else self._disk.keys
        self._public: list[bytes] = []

    def root(self, salt: str | None, adapter: str | None = None) -> bytes:
        """The parent of the first blocks of sequences; PrefixError if a salt is empty."""
        if salt == "":
            raise PrefixError("cache_salt", got="an empty text", expected="a text, or None", fix="Leave it out.")
        return self._keys.root(self._layout, salt, adapter)

    def match(self, tokens: Sequence[int], salt: str | None = None, adapter: str | None = None) -> Match:
        """Find the longest stored prefix of a sequence.

        Args:
            tokens: without the last one if its logits are needed.
            salt: finds sequences inserted under the same salt, and public ones; None counts as a separate salt.
            adapter: finds what was computed with the same one; None for none.

        Raises:
            PrefixError: an empty salt.
            ValueError: a token out of range.
        """
        asked, root = token_bytes(tokens), self.root(salt, adapter)
        best = Match()
        if self.config.enable_block_reuse:
            self._memory.expire()
            best = self._match(root, asked)
            public = max((common_tokens(asked, prefix) for prefix in self._public), default=0)
            if salt is not None and adapter is None and public > best.tokens:
                other = self._match(self.root(None), asked[: public * TOKEN_BYTES])
                best = max(best, other, key=lambda match: match.tokens)
        self.counters.hits += best.tokens > 0
        self.counters.misses += best.tokens == 0
        self.counters.partial_hits += best.tokens % self._step > 0
        self.counters.tokens_asked += len(asked) // TOKEN_BYTES
        self.counters.tokens_saved += best.tokens
        return best

    def restore(self, match: Match, target: Target) -> None:
        """Pass the rows of a match to a target: for each group, those of the tokens that the next one attends to."""
        step, end = self._step, match.tokens
        for part, blocks in enumerate(match.rows):
            needed = self.groups[part].first_needed(end)
            for token, rows in zip(range(needed // step * step, end, step), blocks, strict=True):
                start = max(needed - token, 0)
                piece = rows[:, start : min(step, end - token)]
                target.write(part, token + start, piece)
                self.counters.memory.bytes_out += piece.nbytes

    def reject_snapshot(self, match: Match) -> None:
        """Count and remove the snapshot of a match, which the model refused."""
        if match.states is not None:
            self.counters.rejected_files += 1
            self._memory.remove(match.states.id)
            if self._disk is not None:
                key = match.states.link.key
                rows = self._disk.rows(lambda table: table.named([key]))
                self._disk.drop([row for row in rows if row.part == SNAPSHOT])

    # ------------------------------------------------------------------ insert

    def publish(self, tokens: Sequence[int]) -> None:
        """Let calls with any salt match a sequence that is stored without one."""
        whole = token_bytes(tokens)
        if self.config.enable_block_reuse and whole not in self._public:
            self._public.append(whole)

    def insert(
        self,
        tokens: Sequence[int],
        source: Source,
        *,
        prompt_tokens: int | None = None,
        retention: RetentionPolicy | None = None,
        salt: str | None = None,
        adapter: str | None = None,
        ended: bool = False,
        snapshot: Snapshot | None = None,
    ) -> int:
        """Store the full blocks of a sequence. They can be matched immediately; those in memory are not copied again.

        Stops at the first block that does not fit, or that is not in memory and has no rows. Where more of the last
        block is known, nothing is stored of it.

        Args:
            tokens: the sequence from its first token.
            prompt_tokens: tokens of the prompt; later ones are generated. None: all belong to the prompt.
            retention: new priorities of the blocks; None leaves stored blocks unchanged.
            salt: as in `match`.
            adapter: as in `match`.
            ended: whether the sequence is complete; then an incomplete last block is stored too, for partial reuse.
            snapshot: the states after some of the tokens; for a store with snapshots.

        Returns:
            Leading tokens stored now: a multiple of `tokens_per_block`, or all.

        Raises:
            PrefixError: an empty salt.
            ValueError: numbers out of range, or a snapshot for a store without.
        """
        whole, root = token_bytes(tokens), self.root(salt, adapter)
        length = len(whole) // TOKEN_BYTES
        prompt_tokens = length if prompt_tokens is None else prompt_tokens
        if not 0 <= prompt_tokens <= length:
            raise ValueError(f"prompt_tokens: got {prompt_tokens}; expected 0 to {length}, the tokens")
        if snapshot is not None and not (self.snapshots and 0 < snapshot.tokens <= length):
            got = f"one after {snapshot.tokens} of {length} tokens"
            raise ValueError(f"snapshot: got {got}; expected one within them, and a store with snapshots")
        if not self.config.enable_block_reuse:
            return 0
        self._memory.expire()
        links = self._keys.chain(root, whole, self._step)
        parent, start = tail(links, root), len(links) * self._step
        rest = whole[start * TOKEN_BYTES :] if ended and self.config.enable_partial_reuse else b""
        is_known = any(tokens.startswith(rest) for tokens in self._memory.neighbours((parent, 0), rest))
        if rest and not is_known:
            links.append(self._keys.link(parent, rest, start))
        blocks = self._insert_rows(links, source, prompt_tokens, retention)
        end = links[len(blocks) - 1].end if blocks else 0
        if rest and is_known and len(blocks) == len(links):
            end = length
        if snapshot is not None and snapshot.tokens <= end:
            self._insert_snapshot(links, root, whole, snapshot)
        self._touch(blocks)
        return end

    def _insert_rows(
        self, links: list[Link], source: Source, prompt_tokens: int, retention: RetentionPolicy | None
    ) -> list[list[Block]]:
        """Store the missing blocks while there is memory; for each link up to the last one stored, its blocks."""
        first = [-(-source.first(part) // self._step) for part in self._parts]
        numbers = {link.key: number for number, link in enumerate(links)}
        end = 0

        def is_pinned(id: BlockId) -> bool:  # what has left a limited window may be evicted
            key, part = id
            if key not in numbers or part == SNAPSHOT:
                return False
            return numbers[key] >= self.groups[part].first_needed(end) // self._step

        kept: list[list[Block]] = []
        for number, link in enumerate(links):
            end = link.end
            own = None if retention is None else retention.of(link.start, prompt_tokens)
            blocks = []
            for part, group in enumerate(self.groups):
                block = self._memory.get((link.key, part))
                if block is None and number >= first[part]:
                    block = self._insert_block(link, part, source, is_pinned)
                if block is not None:
                    blocks.append(block)
                    if own is not None:
                        self._memory.retain(block, own)
                elif group.window is None or number >= first[part]:
                    return kept
            kept.append(blocks)
        return kept

    def _insert_block(self, link: Link, part: int, source: Source, is_pinned: IsPinned) -> Block | None:
        """Store the rows of a block; None if all memory is in use. A beginning of it that was stored makes way."""
        group = self.groups[part]
        rows = group.empty(link.end - link.start, self._dtype)
        source.read(part, link.start, rows)
        block = Block(link, part, group.window is None, {ROWS: rows})
        siblings = self._memory.neighbours(block.parent, link.tokens)
        if not self._add(block, is_pinned):
            self.counters.blocks_refused += 1
            return None
        for tokens in siblings:
            if link.tokens.startswith(tokens):
                self._memory.remove((self._keys.link(link.parent, tokens, link.start).key, part))
        return block

    def _insert_snapshot(self, links: list[Link], root: bytes, whole: bytes, snapshot: Snapshot) -> None:
        """Store the states after the last token of a block, or within one."""
        number = (snapshot.tokens - 1) // self._step
        own = whole[number * self._step * TOKEN_BYTES : snapshot.tokens * TOKEN_BYTES]
        link = self._keys.link(tail(links[:number], root), own, number * self._step)
        if (known := self._memory.get((link.key, SNAPSHOT))) is not None:
            self._touch([[known]])
            return
        keys = {link.key for link in links}
        arrays = {name: np.array(array) for name, array in snapshot.arrays.items()}
        block = Block(link, SNAPSHOT, False, arrays)
        self.counters.blocks_refused += not self._add(block, lambda id: id[0] in keys and id[1] != SNAPSHOT)

    def save(self) -> int:
        """Write a file for every block that is worth it, highest priority first, until the disk limit is reached.

        Blocks stay in memory. Returns the files of this store now.
        """
        if self._disk is None:
            return 0
        self._memory.expire()
        blocks = [block for block in self._memory if not block.is_saved and self._is_worth(block)]
        self._disk.write(sorted(blocks, key=lambda block: (block.priority, block.used), reverse=True), self._memory.get)
        return self._disk.held()[0]

    def close(self) -> None:
        """Write the last uses of files to the folder's table and close it; the store must not be used after it."""
        if self._disk is not None:
            self._disk.close()

    @property
    def stats(self) -> StoreStats:
        return self.stats_of(self.counters)

    def stats_of(self, counters: StoreStats) -> StoreStats:
        """Some of the store's counts, and the current content."""
        disk = (0, 0) if self._disk is None else self._disk.held()
        return counters.held((len(self._memory), self._memory.bytes_held), disk)

    # ------------------------------------------------------------------ the search

    def _match(self, root: bytes, asked: bytes) -> Match:
        rows: dict[BlockId, Row] = {}  # of what is on disk alone
        links = self._keys.chain(root, asked, self._step)
        self._look_up([link.key for link in links], rows)
        while links and not self._has((links[-1].key, 0), rows):
            links.pop()
        ends = [number * self._step for number in range(len(links), 0, -1)]
        states = self._states(root, links, asked, rows) if self.snapshots else {}
        start = len(links) * self._step
        rest = asked[start * TOKEN_BYTES : (start + self._step) * TOKEN_BYTES]
        if (beginning := self._partial(tail(links, root), rest, start, rows)) is not None:
            link, count = beginning
            links.append(link)
            ends.insert(0, start + count)
        if self.snapshots:
            ends = sorted((end for end in states if ends and end <= ends[0]), reverse=True)
        while end := self._longest(links, ends, rows):
            needed = [
                [(link, part) for link in links[group.first_needed(end) // self._step : -(-end // self._step)]]
                for part, group in enumerate(self.groups)
            ]
            if self.snapshots:
                needed.append([(states[end], SNAPSHOT)])
            spans = self._load_all(needed, rows)
            if spans is not None:
                snapshot = spans.pop()[0] if self.snapshots else None
                return Match(end, tuple(tuple(block.arrays[ROWS] for block in span) for span in spans), snapshot)
            if self.snapshots and not self._has((states[end].key, SNAPSHOT), rows):
                ends.remove(end)
        return Match()

    def _partial(self, parent: bytes, rest: bytes, start: int, rows: dict[BlockId, Row]) -> tuple[Link, int] | None:
        """The block after a parent that has most of the next tokens, and how many."""
        if not rest or not self.config.enable_partial_reuse:
            return None
        siblings = self._memory.neighbours((parent, 0), rest)
        if self._disk is not None:
            on_disk = self._disk.rows(lambda table: table.neighbours((parent, 0), rest))
            siblings = [*siblings, *(row.tokens for row in on_disk)]
        for count, tokens in sorted(((common_tokens(tokens, rest), tokens) for tokens in siblings), reverse=True):
            link = self._keys.link(parent, tokens, start)
            self._look_up([link.key], rows)
            if count and all(self._has((link.key, part), rows) for part in self._parts):
                return link, count
        return None

    def _states(self, root: bytes, links: list[Link], asked: bytes, rows: dict[BlockId, Row]) -> dict[int, Link]:
        """The snapshots along a sequence, by the tokens before them."""
        parents = [root, *(link.key for link in links)]
        snapshots = {(parent, tokens) for parent in parents for tokens in self._memory.children((parent, SNAPSHOT))}
        if self._disk is not None:
            for row in self._disk.rows(lambda table: table.children(parents, SNAPSHOT)):
                rows[row.key, SNAPSHOT] = row
                snapshots.add((row.parent, row.tokens))
        starts = {parent: number * self._step for number, parent in enumerate(parents)}
        links = [self._keys.link(parent, tokens, starts[parent]) for parent, tokens in snapshots]
        return {link.end: link for link in links if asked.startswith(link.tokens, link.start * TOKEN_BYTES)}

    def _longest(self, links: Sequence[Link], ends: Sequence[int], rows: dict[BlockId, Row]) -> int:
        """The first of these lengths at which every group has the blocks that the next token attends to; else 0."""
        # For each group and block, the first of the blocks that are there without a gap up to this one.
        starts: list[list[int]] = []
        for part in self._parts:
            run = 0
            starts.append([])
            for number, link in enumerate(links):
                run = run if self._has((link.key, part), rows) else number + 1
                starts[part].append(run)
        for end in ends:
            needed = [group.first_needed(end) // self._step for group in self.groups]
            if end and all(run[(end - 1) // self._step] <= at for run, at in zip(starts, needed, strict=True)):
                return end
        return 0

    def _look_up(self, keys: Sequence[bytes], rows: dict[BlockId, Row]) -> None:
        """Add the rows of blocks that are not in memory."""
        if self._disk is not None:
            absent = [key for key in keys if any(self._memory.get((key, part)) is None for part in self._parts)]
            rows_on_disk = self._disk.rows(lambda table: table.named(absent)) if absent else []
            rows.update({(row.key, row.part): row for row in rows_on_disk})

    def _has(self, id: BlockId, rows: dict[BlockId, Row]) -> bool:
        return self._memory.get(id) is not None or id in rows

    def _load_all(self, needed: list[list[tuple[Link, int]]], rows: dict[BlockId, Row]) -> list[list[Block]] | None:
        """Bring blocks into memory; None if one cannot be, which is no longer in `rows` then."""
        pinned = {(link.key, part) for span in needed for link, part in span}
        spans: list[list[Block]] = []
        for span in needed:
            spans.append([])
            for link, part in span:
                block = self._memory.get((link.key, part))
                if block is None:
                    block = self._load(link, part, rows.pop((link.key, part), None))
                    if block is None or not self._add(block, pinned.__contains__):
                        return None
                spans[-1].append(block)
        self._touch(spans)
        return spans

    def _load(self, link: Link, part: int, row: Row | None) -> Block | None:
        """Read a block from disk; None if there is no usable file."""
        if row is None or self._disk is None:
            return None
        expected = {ROWS: (self.groups[part].shape(link.end - link.start), self._dtype)} if part != SNAPSHOT else None
        arrays = self._disk.load(row, lambda read: expected in (None, {n: (a.shape, a.dtype) for n, a in read.items()}))
        chained = part != SNAPSHOT and self.groups[part].window is None
        return None if arrays is None else Block(link, part, chained, arrays, row.priority, is_saved=True)

    def _add(self, block: Block, is_pinned: IsPinned) -> bool:
        """Put a block into memory, if others may be evicted for it; those worth it are written to the folder."""
        size_bytes = block.size_bytes
        if size_bytes > self._memory.budget_bytes:
            return False
        while self._memory.bytes_held + size_bytes > self._memory.budget_bytes:
            victim = self._memory.evict(is_pinned)
            if victim is None:
                return False
            self.counters.memory.evictions += 1
            if self._disk is not None and not victim.is_saved and self._is_worth(victim):
                self._disk.write([victim], self._memory.get)
        self._memory.add(block)
        self.counters.blocks_inserted += not block.is_saved
        self.counters.memory.bytes_in += size_bytes
        return True

    def _is_worth(self, block: Block) -> bool:
        return block.priority >= self.config.secondary_offload_min_priority

    def _touch(self, spans: Sequence[Sequence[Block]]) -> None:
        """Make blocks the most recently used, those before others most of all: they are of use to more sequences."""
        blocks = [block for span in reversed(spans) for block in reversed(span)]
        self._memory.touch(blocks)
        if self._disk is not None:
            self._disk.used(blocks)
