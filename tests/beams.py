"""Beam search over any scorer of next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from edgekv.engine.beam_search import BeamSearch, Hypothesis


class Scorer(Protocol):
    """Computes logits and keeps one state per beam."""

    def first(self) -> np.ndarray[Any, Any]:
        """Logits `[1, V]` after the prompt."""

    def next(self, parents: Sequence[int], tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """Logits `[beams, V]` after beam i has continued beam `parents[i]` with `tokens[i]`; 0 after the prompt."""


def run_search(scorer: Scorer, search: BeamSearch) -> tuple[Hypothesis, ...]:
    """Run the search; return the best `num_return_sequences`, best first."""
    search.advance(scorer.first())
    while not search.done:
        search.advance(scorer.next(search.parents, search.tokens))
    return search.best
