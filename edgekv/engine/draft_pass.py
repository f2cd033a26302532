"""A step whose last rows are guesses, which join the sequence one by one as they prove right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from edgekv.draft import DraftTree
from edgekv.runtime import StaticGraph


class DraftPass:
    """The open step of a verify graph: rows of known tokens, then of drafts.

    A row counts once its token is part of the text. Only then may it be committed, so that a generation that ends in
    the middle of a pass leaves the cache as single steps would have.

    Attributes:
        rows: those that count, ascending: the known ones, then a path in the tree of drafts.
        tokens: of these rows.
    """

    def __init__(self, graph: StaticGraph, known: Sequence[int], drafts: DraftTree) -> None:
        """Args: graph: no step of it is open. known: tokens, at least one. drafts: what may follow them."""
        self.rows = list(range(len(known)))
        self.tokens = list(known)
        self._known = len(known)
        self._drafts = drafts
        self._node = -1
        rows = (*known, *drafts.tokens)
        if drafts.is_chain:
            graph.open(rows)
        else:
            parents = (*range(-1, len(known) - 1), *(len(known) + parent for parent in drafts.parents))
            graph.open_tree(rows, parents)
        self._logits = graph.logits
        graph.before_next_run(self._keep_logits)

    @property
    def logits(self) -> NDArray[Any]:
        """Of the last row that counts, as integers `[V]`."""
        row: NDArray[Any] = self._logits[self.rows[-1]]
        return row

    def has(self, tokens: Sequence[int]) -> bool:
        """Whether the next rows have drafts of exactly these tokens."""
        return len(self._drafts.path(tokens, self._node)) == len(tokens)

    def take(self, tokens: Sequence[int]) -> int:
        """Count the next rows as far as they have drafts of these tokens; return how many."""
        path = self._drafts.path(tokens, self._node)
        self._node = path[-1] if path else self._node
        self.rows += [self._known + node for node in path]
        self.tokens += tokens[: len(path)]
        return len(path)

    def _keep_logits(self) -> None:
        """Another step is about to overwrite the logits."""
        self._logits = self._logits.copy()
