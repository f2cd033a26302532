"""Drafts copied from the prompt and the text so far."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.draft.automaton import Match, SuffixAutomaton
from edgekv.draft.tree import DraftTree

_RESUMED_FROM = 2
"""Tokens of a match that are enough to go on behind a token that broke it."""


class PromptLookup:
    """Proposes what followed the longest end of the text that occurred before.

    A token that occurred nowhere before, such as a new name in a copied text, is taken for a replacement: what follows
    the replaced token is proposed.

    Attributes:
        name: for statistics.
        support: tokens of context that the last proposal rests on; 1 behind a replacement.
        ns_per_token: none worth counting.
    """

    name = "lookup"
    ns_per_token = 0.0

    def __init__(self, *, tree: bool = False) -> None:
        """Start a text; as a `tree`, propose what followed in several places."""
        self.support = 0
        self._tree = tree
        self._automaton = SuffixAutomaton()
        self._before = Match(0, 0)

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int] | DraftTree:
        """The tokens that followed, `k` of them unless nothing occurred before.

        If fewer followed, the text repeats itself, and the repetition is continued.
        """
        automaton = self._automaton
        for token in tokens[len(automaton) :]:
            self._before = automaton.match
            automaton.append(token)
        self.support, start = automaton.match.length, automaton.match.end
        if not self.support and self._before.length >= _RESUMED_FROM:
            self.support, start = 1, self._before.end + 1
        if not self.support:
            return ()
        if self._tree and automaton.match.length:
            return automaton.tree(k)
        copied = list(tokens[start : start + k])
        while len(copied) < k:
            copied += copied[: k - len(copied)]
        return copied

    def accepted(self, n: int) -> None:
        """No-op."""
