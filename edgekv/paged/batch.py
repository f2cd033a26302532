"""The tokens of each sequence, and the blocks that contain them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from edgekv.paged.arrays import Ints, check_array, check_begins, check_range
from edgekv.paged.caches import Caches, Places
from edgekv.paged.errors import PagedInputError


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """One sequence of a batch.

    Attributes:
        past: tokens in the cache before the call.
        new: tokens of this call; their positions are past to past+new-1.
        row: the batch's row of its first new token.
        score: start of its region of the scores.
        table: its blocks, by position // bs; at least as many as its tokens fill.
        block_tokens: bs.
    """

    past: int
    new: int
    row: int
    score: int
    table: Ints
    block_tokens: int

    def places(self, first: int, stop: int) -> Places:
        """Blocks and slots of the positions [first, stop)."""
        positions = np.arange(first, stop)
        return Places(self.table[positions // self.block_tokens], positions % self.block_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The sequences of one call.

    Attributes:
        past_lens: `[B]`, cached tokens of each sequence.
        begins: `[B+1]`, each sequence's first row of the new tokens.
        block_indices: `[n]`, the concatenated block tables of the sequences.
        block_begins: `[B+1]`, each sequence's first entry in it.
        block_tokens: bs.
    """

    past_lens: Ints
    begins: Ints
    block_indices: Ints
    block_begins: Ints
    block_tokens: int

    @classmethod
    def of(
        cls,
        caches: Caches,
        tokens: int,
        past_lens: object,
        subsequence_begins: object,
        block_indices: object,
        block_indices_begins: object,
    ) -> Batch:
        """The batch of `tokens` new tokens that these int32 arrays describe.

        Raises:
            PagedInputError: an array of another type or shape, a negative length, begins that do not rise from 0 to
                the end, a block that the caches lack, or a block table too short for its sequence.
        """
        past: Ints = check_array("past_lens", past_lens, np.int32, 1).astype(np.int64)
        check_range("past_lens", past, 0, None, "tokens")
        begins = check_begins("subsequence_begins", subsequence_begins, len(past), tokens, "the rows of query")
        blocks: Ints = check_array("block_indices", block_indices, np.int32, 1).astype(np.int64)
        check_range("block_indices", blocks, 0, caches.blocks, f"a block of the {caches.blocks} in the caches")
        block_begins = check_begins(
            "block_indices_begins", block_indices_begins, len(past), len(blocks), "the entries of block_indices"
        )
        length, entries = past + np.diff(begins), np.diff(block_begins)
        needed = -(-length // caches.block_tokens)
        if (short := np.flatnonzero(entries < needed)).size:
            i = int(short[0])
            raise PagedInputError(
                "block_indices",
                got=f"{entries[i]} blocks for sequence {i}",
                expected=f"at least {needed[i]} for its {length[i]} tokens, {caches.block_tokens} to a block",
            )
        return cls(past, begins, blocks, block_begins, caches.block_tokens)

    @property
    def scores(self) -> int:
        """Length of the scores: all tokens, cached and new."""
        return int(self.past_lens.sum() + self.begins[-1])

    def __len__(self) -> int:
        return len(self.past_lens)

    def __iter__(self) -> Iterator[Span]:
        score = 0
        for i in range(len(self)):
            past, row, stop = int(self.past_lens[i]), int(self.begins[i]), int(self.begins[i + 1])
            table = self.block_indices[self.block_begins[i] : self.block_begins[i + 1]]
            yield Span(past, stop - row, row, score, table, self.block_tokens)
            score += past + stop - row

    def new_places(self) -> Places:
        """Blocks and slots of all new tokens, in the batch's order."""
        new = np.diff(self.begins)
        positions = np.arange(self.begins[-1]) + np.repeat(self.past_lens - self.begins[:-1], new)
        entries = np.repeat(self.block_begins[:-1], new) + positions // self.block_tokens
        return Places(self.block_indices[entries], positions % self.block_tokens)
