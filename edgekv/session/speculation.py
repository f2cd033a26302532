"""Speculation: the drafts of a generation, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter_ns

from edgekv.draft import Drafter, Pacer


@dataclass(frozen=True, slots=True)
class DrafterStats:
    """What one drafter brought.

    Attributes:
        proposals: passes with its drafts.
        proposed: tokens that it proposed.
        accepted: those that were right.
    """

    proposals: int = 0
    proposed: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Statistics of a generation's speculation.

    Attributes:
        passes: inferences after prefill, with drafts or without.
        tokens: tokens that they brought.
        drafters: by name.
        draft_ns: time in drafters, ns.
        accept_ns: time to sample the rows of passes and to keep the accepted ones, ns.
        replayed_tokens: tokens run again by the decode graph, because the engine's rows are not exact.
    """

    passes: int = 0
    tokens: int = 0
    drafters: dict[str, DrafterStats] = field(default_factory=dict)
    draft_ns: int = 0
    accept_ns: int = 0
    replayed_tokens: int = 0

    @property
    def tokens_per_pass(self) -> float | None:
        """None before the first pass."""
        return self.tokens / self.passes if self.passes else None

    @property
    def proposed(self) -> int:
        """Tokens that all drafters proposed."""
        return sum(each.proposed for each in self.drafters.values())

    @property
    def accepted(self) -> int:
        """Those that were right."""
        return sum(each.accepted for each in self.drafters.values())


class Speculation:
    """Asks a drafter for drafts and counts what became of them. One object serves one generation.

    Attributes:
        stats: so far.
    """

    def __init__(self, drafter: Drafter, pacer: Pacer | None = None) -> None:
        """Without a pacer, each pass has as many drafts as the largest verify graph has rows for."""
        self.stats = SpeculationStats()
        self._drafter = drafter
        self._pacer = pacer

    def propose(self, tokens: Sequence[int], k: int) -> list[int]:
        """Drafts for the next pass, at most k."""
        started = perf_counter_ns()
        most = k if self._pacer is None or k < 1 else min(k, self._pacer.most(k))
        drafts = [*self._drafter.propose(tokens, most)][:most] if most > 0 else []
        self.stats = replace(self.stats, draft_ns=self.stats.draft_ns + perf_counter_ns() - started)
        return drafts

    def ran(self, rows: int, drafts: int, accepted: int, ns: int, accept_ns: int) -> None:
        """Count a pass, and tell drafter and pacer.

        Args:
            rows: AR of its graph.
            drafts: that it ran.
            accepted: those that were right; the pass brought one token more.
            ns: time of the inference.
            accept_ns: time to sample its rows.
        """
        stats, started = self.stats, perf_counter_ns()
        drafters = stats.drafters
        if drafts:
            name = self._drafter.name
            one = drafters.get(name, DrafterStats())
            one = DrafterStats(one.proposals + 1, one.proposed + drafts, one.accepted + accepted)
            drafters = {**drafters, name: one}
            self._drafter.accepted(accepted)
        if self._pacer is not None:
            self._pacer.ran(rows, accepted + 1, ns)
        self.stats = replace(
            stats,
            passes=stats.passes + 1,
            tokens=stats.tokens + accepted + 1,
            drafters=drafters,
            draft_ns=stats.draft_ns + perf_counter_ns() - started,
            accept_ns=stats.accept_ns + accept_ns,
        )
