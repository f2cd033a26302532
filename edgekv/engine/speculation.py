"""Speculation in one text: what its drafter proposes, and what became of the drafts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter_ns

from edgekv.draft import Drafter, DraftRecord, DraftTree, as_tree
from edgekv.engine.session import Session
from edgekv.errors import refuse, shown

_SAMPLES = 15


Propose = Callable[[Sequence[int], int, int, Session | None], list[int]]
"""Gives the tokens that a model finds most likely after a text. Arguments: the text, the maximum number of tokens, the
number of the target's logits (a token beyond them ends the draft), and the target's session; see `ModelDrafter`."""


class ModelDrafter:
    """A model that drafts for one text; a proposal begins with what the model has of it.

    Attributes:
        name: for statistics.
        support: 0: a proposal rests on no match.
        ns_per_token: median time of a proposed token; 1 before the first.
        session: of the model that it drafts for, which holds all but the last tokens of the text; None if none does.
    """

    name = "draft"
    support = 0

    def __init__(self, propose: Propose, vocab: int) -> None:
        """Draft with a model.

        Args:
            propose: of a model, which is open while this is used, and used by nothing else meanwhile.
            vocab: number of the target's logits; a draft ends before a token beyond it.
        """
        self.ns_per_token = 1.0
        self.session: Session | None = None
        self._propose = propose
        self._vocab = vocab
        self._samples: deque[float] = deque(maxlen=_SAMPLES)

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        """At most `k` tokens that follow a text.

        Raises:
            EngineError: the runtime failed.
        """
        started = perf_counter_ns()
        proposed = self._propose(tokens, k, self._vocab, self.session)
        if proposed:
            self._samples.append((perf_counter_ns() - started) / len(proposed))
            self.ns_per_token = median(self._samples)
        return proposed

    def accepted(self, n: int) -> None:
        """No-op."""


@dataclass(slots=True)
class DrafterStats:
    """What one drafter brought.

    Attributes:
        proposals: passes with its drafts.
        proposed: tokens that it proposed.
        accepted: those that were right.
        branched: those of them that the likeliest continuation alone would not have had.
    """

    proposals: int = 0
    proposed: int = 0
    accepted: int = 0
    branched: int = 0


@dataclass(slots=True)
class SpeculationStats:
    """Statistics of a generation's speculation.

    Attributes:
        passes: inferences after prefill, with drafts or without.
        tokens: tokens generated after the first.
        drafters: by name.
        draft_ns: time in drafters, ns.
        accept_ns: time to choose tokens from the rows of passes, ns.
    """

    passes: int = 0
    tokens: int = 0
    drafters: dict[str, DrafterStats] = field(default_factory=dict)
    draft_ns: int = 0
    accept_ns: int = 0

    @property
    def tokens_per_pass(self) -> float | None:
        """None before the first pass."""
        return self.tokens / self.passes if self.passes else None

    @property
    def proposed(self) -> int:
        """Tokens that all drafters proposed."""
        return sum(drafter.proposed for drafter in self.drafters.values())

    @property
    def accepted(self) -> int:
        """Those that were right."""
        return sum(drafter.accepted for drafter in self.drafters.values())


@dataclass(slots=True)
class SpeculationRun:
    """Asks a drafter for drafts and counts what became of them. One object serves one text.

    Attributes:
        drafter: guesses.
        max_drafts: of a pass; None for as many as the graphs take.
        record: where passes are counted; None if nobody asks for them.
        reader: the drafter if it is a model, or the one among others that is; None if none is.
        stats: so far.
    """

    drafter: Drafter
    max_drafts: int | None = None
    record: DraftRecord | None = None
    reader: ModelDrafter | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats, init=False)
    _drafts: DraftTree | None = field(default=None, init=False)  # of the last pass, until the drafter knows
    _right: list[int] = field(default_factory=list, init=False)  # their nodes in the text so far
    _counts: DrafterStats = field(default_factory=DrafterStats, init=False)  # of who drafted them

    def propose(self, tokens: Sequence[int], k: int, vocab: int, session: Session | None = None) -> DraftTree:
        """Drafts for the next pass, at most k; none if k is 0 or less.

        Args:
            tokens: the text so far.
            k: the most.
            vocab: number of the model's logits; drafts end before a token beyond it.
            session: that holds what has run of the text; None if there is none.

        Raises:
            UsageError: the drafter gave something else than token ids.
        """
        self.end()
        if k < 1:
            return DraftTree.chain(())
        if self.reader is not None:
            self.reader.session = session
        started = perf_counter_ns()
        most = k if self.max_drafts is None else min(k, self.max_drafts)
        proposed = self.drafter.propose(tokens, most)
        try:
            drafts = as_tree(proposed).first(most).within(vocab)
        except TypeError:
            refuse(
                f"drafter {self.drafter.name}", shown(proposed), "token ids", "Return a list of ids, or a DraftTree."
            )
        self.stats.draft_ns += perf_counter_ns() - started
        return drafts

    def ran(self, rows: int, drafts: DraftTree, ns: int) -> None:
        """Count a pass.

        Args:
            rows: AR of its graph.
            drafts: those that it ran.
            ns: its time.
        """
        self.stats.passes += 1
        if self.record is not None:
            self.record.add_pass(rows, ns)
        if len(drafts):
            self._counts = self.stats.drafters.setdefault(self.drafter.name, DrafterStats())
            self._counts.proposals += 1
            self._counts.proposed += len(drafts)
            self._drafts, self._right = drafts, []

    def accept(self, tokens: Sequence[int]) -> None:
        """Count the next drafts of the last pass, which were right."""
        if (drafts := self._drafts) is None:
            return
        nodes = drafts.path(tokens, self._right[-1] if self._right else -1)
        self._right += nodes
        self._counts.accepted += len(nodes)
        if not drafts.is_chain:
            self._counts.branched += len({*nodes} - {*drafts.trunk_nodes})

    def chose(self, ns: int) -> None:
        """Count a token after the first, and the time to choose it."""
        self.stats.tokens += 1
        self.stats.accept_ns += ns

    def finish(self) -> None:
        """The text has ended: as `end`, and its session is let go."""
        self.end()
        if self.reader is not None:
            self.reader.session = None

    def end(self) -> None:
        """Tell the drafter how many drafts of the last pass were right, if it does not know yet."""
        drafts, self._drafts = self._drafts, None
        if drafts is not None:
            started = perf_counter_ns()
            self.drafter.accepted(len(self._right))
            self.stats.draft_ns += perf_counter_ns() - started
