"""Drafts copied from the prompt and the text so far, whose repetitions a suffix automaton finds."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush, nlargest

from edgekv.draft.tree import LATER, DraftTree

_BRANCHES = 4
_REFRESHED = 8
"""States whose latest occurrence is noted for each token; all of them could be as many as there are tokens."""
_RESUMED_FROM = 2
"""Tokens of a match that are enough to go on behind a token that broke it."""


class SuffixAutomaton:
    """All substrings of a sequence of tokens (Blumer et al., 1985), built online in amortized constant time a token.

    A state stands for the substrings that end at the same places.
    """

    def __init__(self) -> None:
        """Start with an empty sequence."""
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._end: list[int] = [0]  # index behind a late occurrence of each state
        self._last = 0
        self._size = 0
        self._match = 0, 0

    def __len__(self) -> int:
        return self._size

    @property
    def match(self) -> tuple[int, int]:
        """Length of the longest suffix that occurred before, 0 if none did, and the index behind a late occurrence."""
        return self._match

    def tree(self, most: int) -> DraftTree:
        """What followed the longest suffix that occurred before, wherever it did: at most `most` tokens.

        The latest continuations come first. At the end of the sequence they go on as after an earlier occurrence.
        """
        tokens: list[int] = []
        parents: list[int] = []
        waiting: list[tuple[int, int, int, int]] = []  # order, token, its state, node before it
        self._branch(self._link[self._last], -1, 0, waiting)
        while waiting and len(tokens) < most:
            order, token, state, parent = heappop(waiting)
            tokens.append(token)
            parents.append(parent)
            self._branch(state, len(tokens) - 1, order, waiting)
        return DraftTree(tuple(tokens), tuple(parents))

    def _branch(self, state: int, node: int, order: int, waiting: list[tuple[int, int, int, int]]) -> None:
        """Add what followed a state's substrings to what waits for a place in a tree, behind a node of this order."""
        while state > 0 and not self._next[state]:
            state = self._link[state]
        if state <= 0:
            return
        latest = nlargest(_BRANCHES, self._next[state].items(), key=lambda item: self._end[item[1]])
        for rank, (token, after) in enumerate(latest):
            heappush(waiting, (order + 1 + LATER * rank, token, after, node))

    def append(self, token: int) -> None:
        """Add a token."""
        following, link, length, end = self._next, self._link, self._length, self._end
        self._size += 1
        new = self._new_state(self._size, {}, 0, self._size)
        state = self._last
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = link[state]
        if state >= 0:
            after = following[state][token]
            if length[after] > length[state] + 1:
                after = self._split(after, state, token)
            link[new] = after
        self._last = new
        earlier = link[new]
        self._match = length[earlier], end[earlier] if earlier else 0
        for _ in range(_REFRESHED):
            if earlier <= 0:
                break
            end[earlier] = self._size
            earlier = link[earlier]

    def _split(self, divided: int, state: int, token: int) -> int:
        """A state for those of a state's substrings that also end at the new token."""
        clone = self._new_state(
            self._length[state] + 1, self._next[divided].copy(), self._link[divided], self._end[divided]
        )
        self._link[divided] = clone
        while state >= 0 and self._next[state].get(token) == divided:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _new_state(self, length: int, following: dict[int, int], link: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._link) - 1


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
        self._before = 0, 0

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int] | DraftTree:
        """The tokens that followed, `k` of them unless nothing occurred before.

        If fewer followed, the text repeats itself, and the repetition is continued.
        """
        automaton = self._automaton
        for token in tokens[len(automaton) :]:
            self._before = automaton.match
            automaton.append(token)
        matched, start = automaton.match
        self.support, (before, end) = matched, self._before
        if not matched and before >= _RESUMED_FROM:
            self.support, start = 1, end + 1
        if not self.support:
            return ()
        if self._tree and matched:
            return automaton.tree(k)
        copied = list(tokens[start : start + k])
        while len(copied) < k:
            copied += copied[: k - len(copied)]
        return copied

    def accepted(self, n: int) -> None:
        """No-op."""
