"""A step whose last tokens are guesses, which join the sequence one by one as they prove right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from edgekv.runtime import StaticGraph


class DraftPass:
    """The open step of a verify graph: rows of known tokens, then of drafts.

    A row counts once its token is part of the text. Only then may it be committed, so that a generation that ends in
    the middle of a pass leaves the cache as single steps would have.

    Attributes:
        tokens: of the rows.
        taken: rows that count; at least the known ones.
    """

    def __init__(self, graph: StaticGraph, tokens: Sequence[int], known: int) -> None:
        """Args: graph: it has just run them. tokens: of its rows. known: how many of them are no drafts."""
        self.tokens = list(tokens)
        self.taken = known
        self._logits = graph.logits
        graph.before_next_run(self._keep_logits)

    @property
    def logits(self) -> NDArray[Any]:
        """Of the last row that counts, as integers `[V]`."""
        row: NDArray[Any] = self._logits[self.taken - 1]
        return row

    def has(self, tokens: Sequence[int]) -> bool:
        """Whether the next rows are drafts of exactly these tokens."""
        return self.tokens[self.taken : self.taken + len(tokens)] == list(tokens)

    def take(self, tokens: Sequence[int]) -> int:
        """Count the next rows as far as their drafts are these tokens; return how many."""
        drafts = self.tokens[self.taken :]
        right = 0
        while right < min(len(tokens), len(drafts)) and tokens[right] == drafts[right]:
            right += 1
        self.taken += right
        return right

    def _keep_logits(self) -> None:
        """Another step is about to overwrite the logits."""
        self._logits = self._logits.copy()
