"""Drafts copied from the prompt and the text so far."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.draft.automaton import SuffixAutomaton


class PromptLookup:
    """Proposes what followed the longest end of the text that occurred before.

    Attributes:
        name: for statistics.
        support: tokens of context that the last proposal rests on.
        ns_per_token: none worth counting.
    """

    name = "lookup"
    ns_per_token = 0.0

    def __init__(self) -> None:
        """Start a text."""
        self.support = 0
        self._automaton = SuffixAutomaton()

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        """The tokens that followed, `k` of them unless nothing occurred before.

        If fewer followed, the text repeats itself, and the repetition is continued.
        """
        automaton = self._automaton
        for token in tokens[len(automaton) :]:
            automaton.append(token)
        match = automaton.match
        self.support = match.length
        if not match.length:
            return ()
        copied = list(tokens[match.end : match.end + k])
        while len(copied) < k:
            copied += copied[: k - len(copied)]
        return copied

    def accepted(self, n: int) -> None:
        """Nothing to note."""
