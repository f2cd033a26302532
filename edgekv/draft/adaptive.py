"""Speculation where it pays, by what drafts were worth and what passes cost."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edgekv.draft.speculation import Drafter
from edgekv.draft.tree import DraftTree, as_tree

_MARGIN = 1.1
"""A pass with drafts has to be expected to be faster by this factor."""
_PROBE_TOKENS = 256
"""A drafter that takes time and does not pay is tried again after as many tokens of a text."""
_DECAY = 0.95
"""Weight of a draft after the next one of its kind."""
_PRIOR_WEIGHT = 2.0
_PRIOR = ((0.6, 0.6), (0.25, 0.65), (0.6, 0.78), (0.8, 0.87), (0.85, 0.9), (0.95, 0.96))
"""How likely the first token of a draft is right, and a further one after right ones, by the draft's class: as measured
with prompt lookup in SmolLM2-135M (`benchmarks.speculation`)."""
MAX_TOKENS = 31
"""Tokens of a draft that are counted."""
_SAMPLES = 31
_MANY = 8
_PATIENCE = 256
_MAX_PATIENCE = 4096
_COST_OF_A_ROW = 1 / 64
"""Of a pass of one row; assumed of a graph that has not run yet. 8 to 16 rows cost an NPU some 1.1 to 1.2 passes."""


class Acceptance:
    """Right tokens of the drafts of one drafter, with less weight the longer ago.

    Drafts are divided by the matched tokens of context: none, 1, 2 to 3, 4 to 7, 8 to 15, and more.
    """

    def __init__(self) -> None:
        """Start with what is usual."""
        self._right = [[_PRIOR_WEIGHT * first * more**n for n in range(MAX_TOKENS)] for first, more in _PRIOR]
        self._weight = [_PRIOR_WEIGHT] * len(_PRIOR)

    def add(self, support: int, right: int) -> None:
        """Count a draft whose first `right` tokens were right."""
        kind = _kind(support)
        self._weight[kind] = self._weight[kind] * _DECAY + 1
        self._right[kind] = [count * _DECAY + (at < right) for at, count in enumerate(self._right[kind])]

    def expected(self, support: int, tokens: int) -> float:
        """How many of a draft's first tokens are expected to be right."""
        kind = _kind(support)
        return sum(self._right[kind][:tokens]) / self._weight[kind]


def _kind(support: int) -> int:
    return min(support.bit_length(), len(_PRIOR) - 1)


@dataclass(slots=True)
class _Graph:
    """Passes of one size.

    Attributes:
        samples_ns: of the last passes.
        ns: what is expected; None before it was measured.
        has_loaded: whether it has run before: the first pass also loads the graph.
        last: number of the last pass.
        patience: passes of other graphs after which its cost is forgotten.
    """

    samples_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    ns: float | None = None
    has_loaded: bool = False
    last: int = 0
    patience: int = _PATIENCE

    def add(self, ns: int) -> None:
        if not self.has_loaded:
            self.has_loaded = True
            return
        self.samples_ns.append(ns)
        self.ns = sorted(self.samples_ns)[(len(self.samples_ns) - 1) // 4]
        if len(self.samples_ns) >= _MANY:
            self.patience = _PATIENCE

    def forget(self) -> None:
        self.samples_ns.clear()
        self.ns = None
        self.patience = min(2 * self.patience, _MAX_PATIENCE)


class DraftRecord:
    """What speculation has measured in a model, which all its texts share: a new one need not begin without.

    A pass costs the lower quartile of the last ones of its size: on a busy machine more than half of the long passes
    can be interrupted, and few of the short ones. More rows never cost less: where a size seems to, the smaller one was
    disturbed, and is tried again. The cost of a size that has not run for 256 passes is forgotten, so that it is tried
    again; for twice as many if it then runs only a few times, and so on up to 4,096.

    Attributes:
        acceptance: of drafts, by the name of their drafter.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.acceptance: defaultdict[str, Acceptance] = defaultdict(Acceptance)
        self._graphs: dict[int, _Graph] = {}
        self._passes = 0

    def add_pass(self, rows: int, ns: int) -> None:
        """Count a pass of a graph of this many rows. The first one of each size does not count: it loads the graph."""
        self._passes += 1
        graph = self._graphs.setdefault(rows, _Graph())
        graph.last = self._passes
        graph.add(ns)

    def pass_ns(self, rows: int) -> float:
        """Time of a pass; if it is not known, what can be hoped for from passes of fewer and of more rows."""
        known_ns = self._measured_ns(rows)
        larger = [(more, ns) for more in sorted(self._graphs) if more > rows and (ns := self._measured_ns(more))]
        if known_ns is not None and (rows == 1 or all(known_ns <= ns for _, ns in larger)):
            return known_ns
        step_ns = self._measured_ns(1) or 1.0
        if larger:
            more, ns = larger[0]
            return step_ns + max(ns - step_ns, 0) * (rows - 1) / (more - 1)
        return step_ns * (1 + (rows - 1) * _COST_OF_A_ROW)

    def _measured_ns(self, rows: int) -> float | None:
        graph = self._graphs.get(rows)
        if graph is not None and graph.ns is not None and rows != 1 and self._passes - graph.last >= graph.patience:
            graph.forget()
        return None if graph is None else graph.ns


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


@dataclass(slots=True)
class _Tried:
    """A drafter, and what its proposals were worth.

    Attributes:
        source: the drafter.
        acceptance: of its proposals.
        pending: a proposal, which is compared with the text as it grows even if no pass checked it; None if there is
            none.
        pending_at: tokens of the text that it follows.
        support: of it.
        asked_at: tokens of the text at which a drafter that takes time was asked; None before that.
    """

    source: Source
    acceptance: Acceptance
    pending: DraftTree | None = None
    pending_at: int = 0
    support: int = 0
    asked_at: int | None = None

    def keep(self, draft: DraftTree, at: int) -> None:
        """Have a proposal compared, unless an earlier one is."""
        if len(draft) and self.pending is None:
            self.pending, self.pending_at, self.support = draft, at, self.source.support

    def compare(self, tokens: Sequence[int]) -> None:
        """Count the pending proposal once the text says how much of it is right."""
        if (draft := self.pending) is None:
            return
        right = draft.path(tokens[self.pending_at : self.pending_at + len(draft)])
        if self.pending_at + len(right) == len(tokens) and draft.continues(right[-1] if right else -1):
            return
        self.acceptance.add(self.support, len(right))
        self.pending = None


class AdaptiveDrafter:
    """Asks several drafters, takes the draft that promises the most tokens a second, and none where none pays.

    Proposals that are not used are compared with the text too, so that acceptance is measured while speculation is
    off. One object serves one text, as its drafters do.

    Attributes:
        name: of the drafter whose draft was taken last.
    """

    def __init__(self, sources: Sequence[Source], rows: Sequence[int], record: DraftRecord, most: int) -> None:
        """Measure from now on.

        Args:
            sources: drafters; of equally promising drafts the first one's is taken.
            rows: tokens per inference of the graphs that can check drafts.
            record: of the model; who runs passes adds theirs.
            most: tokens of a draft.
        """
        self.name = ""
        self._tried = [_Tried(source, record.acceptance[source.name]) for source in sources]
        self._rows = sorted(rows)
        self._record = record
        self._most = min(most, self._rows[-1] - 1, MAX_TOKENS)
        self._taken: Source | None = None

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int] | DraftTree:
        """The draft that promises most, as long as pays; none if a plain step promises more."""
        best = DraftTree.chain(())
        best_rate = _MARGIN / self._record.pass_ns(1)
        self._taken = None
        for tried in self._tried:
            tried.compare(tokens)
            draft = self._ask(tried, tokens, k, best_rate)
            if not len(draft):
                continue
            length, rate = self._fastest(tried, tried.source.support, len(draft), draft)
            if rate > best_rate:
                best, best_rate, self._taken, self.name = draft.first(length), rate, tried.source, tried.source.name
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
        tried.keep(draft, at)
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
            rate = promised / (self._record.pass_ns(rows) + tried.source.ns_per_token * length)
            if rate > best_rate:
                best, best_rate = length, rate
            if length == most:
                break
        return best, best_rate
