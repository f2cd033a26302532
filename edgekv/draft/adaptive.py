"""Speculation where it pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edgekv.draft.acceptance import MOST_TOKENS, Acceptance
from edgekv.draft.drafter import Drafter
from edgekv.draft.record import DraftRecord
from edgekv.draft.tree import DraftTree, as_tree

_MARGIN = 1.1
"""A pass with drafts has to be expected to be faster by this factor."""
_PROBE_TOKENS = 256
"""A drafter that takes time and does not pay is tried again after as many tokens of a text."""


class FixedLimit:
    """A pacer that is always the same."""

    def __init__(self, tokens: int) -> None:
        """Args: tokens: drafts of a pass at most."""
        self._tokens = tokens

    def most(self, k: int) -> int:
        return min(k, self._tokens)

    def ran(self, rows: int, tokens: int, ns: int) -> None:
        """No-op."""


class Source(Drafter, Protocol):
    """A drafter that says what its proposals rest on.

    Attributes:
        support: tokens of context that the last proposal rests on; 0 if it rests on something else.
        ns_per_token: what a proposed token costs; 0 if next to nothing.
    """

    @property
    def support(self) -> int: ...

    @property
    def ns_per_token(self) -> float: ...


@dataclass(frozen=True, slots=True)
class _Draft:
    """A proposal, which is compared with the text as it grows even if no pass checked it."""

    at: int
    tree: DraftTree
    support: int


@dataclass(slots=True)
class _Tried:
    """A drafter, and what its proposals were worth."""

    source: Source
    acceptance: Acceptance
    pending: _Draft | None = None
    asked_at: int | None = None

    def compare(self, tokens: Sequence[int]) -> None:
        """Count the pending proposal once the text says how much of it is right."""
        if (draft := self.pending) is None:
            return
        right = draft.tree.path(tokens[draft.at : draft.at + len(draft.tree)])
        if draft.at + len(right) == len(tokens) and draft.tree.continues(right[-1] if right else -1):
            return
        self.acceptance.add(draft.support, len(right))
        self.pending = None


class AdaptiveDrafter:
    """Asks several drafters, takes the draft that promises the most tokens a second, and none where none pays.

    Proposals that are not used are compared with the text too, so that acceptance is measured while speculation is
    off. A pass's time is that of the last ones, see `PassCosts`. One object serves one text, as its drafters do.
    """

    def __init__(self, sources: Sequence[Source], rows: Sequence[int], record: DraftRecord, most: int) -> None:
        """Measure from now on.

        Args:
            sources: drafters; of equally promising drafts the first one's is taken.
            rows: tokens per inference of the graphs that can check drafts.
            record: of the model.
            most: tokens of a draft.
        """
        self.name = ""
        self._tried = [_Tried(each, record.acceptance[each.name]) for each in sources]
        self._rows = sorted(rows)
        self._costs = record.costs
        self._most = min(most, self._rows[-1] - 1, MOST_TOKENS)
        self._taken: Source | None = None

    def most(self, k: int) -> int:
        """All that have room: `propose` decides, since it depends on the draft."""
        return k

    def ran(self, rows: int, tokens: int, ns: int) -> None:
        """Note what a pass cost."""
        self._costs.add(rows, ns)

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int] | DraftTree:
        """The draft that promises most, as long as pays; none if a plain step promises more."""
        best = DraftTree.chain(())
        best_rate = _MARGIN / self._costs.ns(1)
        self._taken = None
        for each in self._tried:
            each.compare(tokens)
            draft = self._ask(each, tokens, k, best_rate)
            if not len(draft):
                continue
            length, rate = self._fastest(each, each.source.support, len(draft), draft)
            if rate > best_rate:
                best, best_rate, self._taken, self.name = draft.first(length), rate, each.source, each.source.name
        return best.tokens if best.is_chain else best

    def accepted(self, n: int) -> None:
        if self._taken is not None:
            self._taken.accepted(n)

    def _ask(self, tried: _Tried, tokens: Sequence[int], k: int, rate: float) -> DraftTree:
        """The draft of a source; one that costs time is asked only if it can beat a rate, or to try it again."""
        at, most = len(tokens), min(k, self._most)
        source = tried.source
        if source.ns_per_token:
            length, promised = self._fastest(tried, 0, most)
            is_due = tried.asked_at is None or at - tried.asked_at >= _PROBE_TOKENS
            if promised <= rate and not is_due:
                return DraftTree.chain(())
            most = length if promised > rate else min(most, self._rows[0] - 1)
            tried.asked_at = at
        draft = as_tree(source.propose(tokens, most))
        if len(draft) and tried.pending is None:
            tried.pending = _Draft(at, draft, source.support)
        return draft

    def _fastest(self, tried: _Tried, support: int, most: int, draft: DraftTree | None = None) -> tuple[int, float]:
        """The number of drafts that promises the most tokens a second, and that rate in tokens a nanosecond.

        Without a draft, it is taken for one continuation.
        """
        best, best_rate = 0, 0.0
        for rows in self._rows:
            length = min(most, rows - 1)
            depth = length if draft is None else draft.first(length).depth
            promised = 1 + tried.acceptance.expected(support, depth)
            rate = promised / (self._costs.ns(rows) + tried.source.ns_per_token * length)
            if rate > best_rate:
                best, best_rate = length, rate
            if length == most:
                break
        return best, best_rate
