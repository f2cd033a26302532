"""Eviction by score: a bounded cache that keeps the blocks with the most attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from edgekv.paged.arrays import Floats, Ints, check_array, check_range
from edgekv.paged.errors import PagedInputError
from edgekv.paged.ledger import AGGREGATIONS, Aggregation, ScoreLedger
from edgekv.paged.rotation import rotation_trig_lut


@dataclass(frozen=True, slots=True)
class CacheEvictionConfig:
    """The three areas of a sequence's cache: start, evictable and recent, as in OpenVINO GenAI's class of this name.

    Only full blocks of the evictable area are dropped, so a sequence holds at most max_tokens + block_tokens - 1
    tokens after an eviction. All sizes are in tokens: multiples of a block, at least one block.

    Attributes:
        start_tokens: the oldest tokens, which always stay (attention sinks, arXiv 2309.17453).
        recent_tokens: the newest tokens in full blocks, which stay until newer ones push them out of this area.
        max_tokens: all areas together; more than the two above.
        block_tokens: bs, tokens of a block.
        aggregation: `sum` or `normalized sum`: how scores of several calls combine to a token's importance.
    """

    start_tokens: int
    recent_tokens: int
    max_tokens: int
    block_tokens: int
    aggregation: Aggregation = "normalized sum"

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise PagedInputError("block_tokens", got=self.block_tokens, expected="at least 1")
        for field in ("start_tokens", "recent_tokens", "max_tokens"):
            tokens = getattr(self, field)
            if tokens < 1 or tokens % self.block_tokens:
                expected = f"a multiple of the {self.block_tokens} tokens of a block, at least one block"
                raise PagedInputError(field, got=tokens, expected=expected)
        if self.max_tokens <= (kept := self.start_tokens + self.recent_tokens):
            expected = f"more than start and recent together, {kept} tokens"
            raise PagedInputError("max_tokens", got=self.max_tokens, expected=expected)
        if self.aggregation not in AGGREGATIONS:
            expected = " or ".join(map(repr, AGGREGATIONS))
            raise PagedInputError("aggregation", got=repr(self.aggregation), expected=expected)

    @classmethod
    def in_blocks(
        cls, start: int, recent: int, maximum: int, *, block_tokens: int, aggregation: Aggregation = "normalized sum"
    ) -> CacheEvictionConfig:
        """The sizes of the areas in blocks."""
        return cls(start * block_tokens, recent * block_tokens, maximum * block_tokens, block_tokens, aggregation)

    def evictable(self, tokens: int) -> range:
        """Table indices of the evictable blocks when `tokens` are cached."""
        full = tokens // self.block_tokens
        start = self.start_tokens // self.block_tokens
        return range(start, max(start, full - self.recent_tokens // self.block_tokens))

    def excess_blocks(self, tokens: int) -> int:
        """Number of blocks to drop when `tokens` are cached; at most the evictable ones."""
        return max(0, (tokens - self.max_tokens) // self.block_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Eviction:
    """The dropped blocks, and the operator's inputs for the sequence's next call, which must use all of them.

    Attributes:
        dropped: indices in the old table, ascending; empty if nothing was dropped.
        freed_blocks: the blocks at these indices, int32, which the sequence no longer reads.
        block_indices: the sequence's new block table, int32, unused blocks at its end included.
        past_tokens: tokens still cached; the next token's position.
        rotated_block_indices: `[m]` int32, blocks whose tokens moved to earlier positions.
        rotation_deltas: `[m, 1]` int32, the number of positions.
        rotation_trig_lut: `[M, S]`.
    """

    dropped: Ints
    freed_blocks: NDArray[np.int32]
    block_indices: NDArray[np.int32]
    past_tokens: int
    rotated_block_indices: NDArray[np.int32]
    rotation_deltas: NDArray[np.int32]
    rotation_trig_lut: Floats


class CacheEvictor:
    """Chooses the blocks that one sequence drops from the cache of one layer.

    After each call of the operator, `record` its scores; before the next one, `evict`. Attention then treats the
    dropped tokens as if they had never existed: positions count only kept tokens. The blocks it rotates change in
    place, so none of them may be shared with another sequence.

    Attributes:
        config: the areas.
    """

    def __init__(
        self, config: CacheEvictionConfig, inverse_frequencies: Sequence[float], dtype: DTypeLike = np.float32
    ) -> None:
        """An evictor for an empty sequence.

        Args:
            inverse_frequencies: rotary frequencies of the model's keys, `[S/2]`, radians per position.
            dtype: the type of the caches.

        Raises:
            PagedInputError: no frequencies, or one that is not finite.
        """
        self.config = config
        self._ledger = ScoreLedger(config.aggregation)
        self._frequencies = inverse_frequencies
        self._lut = rotation_trig_lut(inverse_frequencies, config.block_tokens + 1, dtype)

    @property
    def tokens(self) -> int:
        """Tokens cached."""
        return len(self._ledger)

    def record(self, scores: Floats, *, new_tokens: int, aggregation_window: int = 1) -> None:
        """Add the sequence's region `[past + new_tokens]` of the scores of one call of the operator.

        Raises:
            PagedInputError: see `ScoreLedger.add`.
        """
        self._ledger.add(scores, new_tokens=new_tokens, aggregation_window=aggregation_window)

    def evict(self, block_indices: NDArray[np.int32]) -> Eviction:
        """Drop the evictable blocks with the lowest scores until the rest fits; ties drop the older block.

        Args:
            block_indices: the sequence's block table, int32; each block once.

        Raises:
            PagedInputError: a table of another type, too short, with a negative entry or one block twice; nothing is
                dropped.
        """
        table = self._check_table(block_indices)
        block_tokens = self.config.block_tokens
        evictable = self.config.evictable(self.tokens)
        scores = self._ledger.block_scores(block_tokens)[evictable.start : evictable.stop]
        excess = self.config.excess_blocks(self.tokens)
        dropped: Ints = np.sort(np.argsort(scores, kind="stable")[:excess]) + evictable.start
        kept = np.delete(np.arange(len(table)), dropped)
        held = kept[: -(-self.tokens // block_tokens) - len(dropped)]
        moved_blocks = held - np.arange(len(held))
        moved = moved_blocks > 0
        self._ledger.drop(dropped, block_tokens)
        return Eviction(
            dropped=dropped,
            freed_blocks=table[dropped],
            block_indices=table[kept],
            past_tokens=self.tokens,
            rotated_block_indices=table[held[moved]],
            rotation_deltas=(moved_blocks[moved, None] * block_tokens).astype(np.int32),
            rotation_trig_lut=self._table(len(dropped) * block_tokens + 1),
        )

    def _check_table(self, indices: object) -> NDArray[np.int32]:
        table: NDArray[np.int32] = check_array("block_indices", indices, np.int32, 1)
        check_range("block_indices", table, 0, None, "a block of the caches")
        needed = -(-self.tokens // self.config.block_tokens)
        if len(table) < needed:
            raise PagedInputError("block_indices", got=f"{len(table)} blocks", expected=f"at least {needed}")
        if len(np.unique(table)) < len(table):
            raise PagedInputError("block_indices", got=table.tolist(), expected="each block once")
        return table

    def _table(self, rows: int) -> Floats:
        if rows > len(self._lut):
            self._lut = rotation_trig_lut(self._frequencies, rows, self._lut.dtype)
        return self._lut
