"""The accumulated attention of each cached token of a sequence."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from edgekv.paged.arrays import Floats, Ints, shape_text
from edgekv.paged.errors import PagedInputError

Aggregation = Literal["sum", "normalized sum"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


class ScoreLedger:
    """Aggregated scores of one sequence in one layer, token by token.

    `sum` adds up the attention weights of a token. It favours old tokens, which more queries have seen; `normalized
    sum` divides by the number of these queries.
    """

    def __init__(self, aggregation: Aggregation) -> None:
        if aggregation not in AGGREGATIONS:
            raise PagedInputError("aggregation", got=repr(aggregation), expected=" or ".join(map(repr, AGGREGATIONS)))
        self.aggregation = aggregation
        self._weights = np.zeros(0)
        self._queries = np.zeros(0, np.int64)

    def __len__(self) -> int:
        """Tokens in the cache."""
        return len(self._weights)

    def add(self, scores: Floats, *, new_tokens: int, aggregation_window: int = 1) -> None:
        """Add one call of the operator.

        Args:
            scores: the sequence's region of the operator's scores, `[past + new_tokens]`.
            new_tokens: tokens that the call appended.
            aggregation_window: the call's `score_aggregation_window` for this sequence.

        Raises:
            PagedInputError: negative counts, or scores of another length, negative or not finite; nothing is entered.
        """
        for field, count in (("new_tokens", new_tokens), ("aggregation_window", aggregation_window)):
            if count < 0:
                raise PagedInputError(field, got=count, expected="at least 0")
        weights = np.asarray(scores, np.float64)
        tokens = len(self) + new_tokens
        if weights.shape != (tokens,):
            expected = f"[{tokens}], {len(self)} tokens cached and {new_tokens} new"
            raise PagedInputError("scores", got=shape_text(weights.shape), expected=expected)
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise PagedInputError("scores", got=weights.tolist(), expected="sums of attention weights, 0 or above")
        # A token is seen by itself and by the later ones of the last queries.
        seen = np.minimum(min(aggregation_window, new_tokens), tokens - np.arange(tokens))
        self._weights = np.pad(self._weights, (0, new_tokens)) + weights
        self._queries = np.pad(self._queries, (0, new_tokens)) + seen

    def block_scores(self, block_tokens: int) -> NDArray[np.float64]:
        """The sum over the tokens of each block that is full, `[tokens // block_tokens]`."""
        tokens = self._weights
        if self.aggregation == "normalized sum":
            tokens = self._weights / np.maximum(self._queries, 1)
        blocks = len(tokens) // block_tokens
        sums: NDArray[np.float64] = tokens[: blocks * block_tokens].reshape(blocks, block_tokens).sum(axis=1)
        return sums

    def drop(self, blocks: Ints, block_tokens: int) -> None:
        """Drop the tokens of these blocks; later ones move up."""
        tokens = (blocks[:, None] * block_tokens + np.arange(block_tokens)).ravel()
        self._weights, self._queries = np.delete(self._weights, tokens), np.delete(self._queries, tokens)
