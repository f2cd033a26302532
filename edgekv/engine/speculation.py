"""Speculation: which drafters a text has, and what became of their drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from time import perf_counter_ns
from typing import Any
from weakref import WeakSet

from edgekv.draft import (
    AdaptiveDrafter,
    CorpusDrafter,
    Drafter,
    DraftRecord,
    DraftTree,
    FixedLimit,
    Pacer,
    PromptLookup,
    Source,
    Speculation,
    as_tree,
)
from edgekv.engine.cache_drafter import StateDrafter
from edgekv.engine.draft_model import DraftModel
from edgekv.engine.session import Session
from edgekv.errors import refuse, shown

EXPORT_FIX = "Export it with --draft-rows 8."


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """The model whose tokens are drafted.

    Attributes:
        model: as a draft model of others: its tokenizer and place.
        engine: its name.
        rows: tokens per inference of the graphs that check drafts, ascending; none if there is no such graph.
        vocab: number of the logits.
        takes_drafts: whether the engine gives a token the same bits beside drafts as alone.
        only_chains: what does not let drafts branch; empty if they may.
        record: what speculation has measured.
        drafts: the models that have drafted for it.
    """

    model: DraftModel
    engine: str
    rows: Sequence[int]
    vocab: int
    takes_drafts: bool
    only_chains: str
    record: DraftRecord = field(default_factory=DraftRecord)
    drafts: WeakSet[Any] = field(default_factory=WeakSet)

    def close(self) -> None:
        """Let models that drafted for it free what they hold for its texts."""
        for draft in self.drafts:
            draft.forget()
        self.drafts.clear()

    def check(self, wanted: Speculation) -> None:
        """Refuse what the bundle cannot do.

        Raises:
            UsageError: a named drafter in a bundle without verify graphs or on an engine that cannot check drafts, more
                drafts than the graphs have room for, a tree where drafts may not branch, or a draft bundle with another
                tokenizer.
        """
        rows = self.rows
        if not rows and wanted.mode not in ("auto", "off"):
            refuse("mode", f"{wanted.mode} in a bundle without verify graphs", "verify graphs", EXPORT_FIX)
        if rows and not self.takes_drafts and wanted.mode not in ("auto", "off"):
            found = f"{wanted.mode} on the engine {self.engine}, whose results depend on the number of tokens"
            wanted_engine = "an engine that gives a token the same bits beside others, such as htp, or cpu on x86"
            refuse("mode", found, wanted_engine, "Use auto, which drafts nothing here, or leave it out.")
        if rows and wanted.tokens is not None and wanted.tokens >= rows[-1]:
            found = f"{wanted.tokens} drafts of a pass"
            most = f"at most {rows[-1] - 1}: the largest verify graph has {rows[-1]} rows, one of them no draft"
            fix = f"Give less, or export with --draft-rows {wanted.tokens + 1}."
            refuse("tokens", found, most, fix)
        if rows and wanted.tree and self.only_chains:
            wanted_bits = (
                "a model and an engine that give a token the same bits in any column, such as attention on htp"
            )
            refuse("tree", self.only_chains, wanted_bits, "Leave it out.")
        for name, given, fix in (
            ("corpus", wanted.corpus, "Open it with Model.open_corpus."),
            ("draft", wanted.draft, "Load it with edgekv.load."),
        ):
            if isinstance(given, str | PathLike):
                refuse(name, f"the path {fspath(given)!r}", "what it leads to", fix)
        if wanted.draft is not None and not isinstance(wanted.draft, str):
            wanted.draft.draft_model.check(self.model)

    def begin(self, wanted: Speculation | None) -> SpeculationRun | None:
        """The speculation of one text; None for none, as with `auto` in a bundle without verify graphs.

        Raises:
            UsageError: see `check`.
        """
        if wanted is None or wanted.mode == "off":
            return None
        self.check(wanted)
        if wanted.drafter is not None:
            return SpeculationRun(wanted.drafter, None if wanted.tokens is None else FixedLimit(wanted.tokens))
        if not self.rows:
            return None
        sources: list[Source] = []
        reader: StateDrafter | None = None
        if wanted.mode in ("lookup", "auto"):
            sources.append(PromptLookup(tree=wanted.tree))
        if wanted.corpus is not None and not isinstance(wanted.corpus, str):
            sources.append(CorpusDrafter(wanted.corpus, tree=wanted.tree))
        if wanted.draft is not None and not isinstance(wanted.draft, str):
            drafter: Source = wanted.draft.draft_model.drafter(self.vocab)
            self.drafts.add(wanted.draft.draft_model)
            sources.append(drafter)
            reader = drafter if isinstance(drafter, StateDrafter) else None
        most = wanted.tokens or self.rows[-1] - 1
        if wanted.mode == "auto":
            adaptive = AdaptiveDrafter(sources, self.rows, self.record, most)
            return SpeculationRun(adaptive, adaptive, reader)
        (source,) = sources
        return SpeculationRun(source, FixedLimit(most), reader)


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


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Statistics of a generation's speculation.

    Attributes:
        passes: inferences after prefill, with drafts or without.
        tokens: tokens generated after the first.
        drafters: by name.
        draft_ns: time in drafters, ns.
        accept_ns: time to choose tokens from the rows of passes, ns.
    """

    passes: int
    tokens: int
    drafters: Mapping[str, DrafterStats]
    draft_ns: int
    accept_ns: int

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


@dataclass(slots=True)
class _Pass:
    """The last pass: AR of its graph, drafts, its time in ns, who drafted, right drafts, and the last of these."""

    rows: int
    drafts: DraftTree
    ns: int
    drafter: DrafterStats | None
    right: int = 0
    node: int = -1


@dataclass(slots=True)
class SpeculationRun:
    """Asks a drafter for drafts and counts what became of them. One object serves one text.

    Attributes:
        drafter: guesses.
        pacer: decides how many tokens to guess; None for as many as the graphs take.
        reader: the drafter that reads the cache or the hidden states of the text; None if none does.
    """

    drafter: Drafter
    pacer: Pacer | None = None
    reader: StateDrafter | None = None
    _drafters: dict[str, DrafterStats] = field(default_factory=dict, init=False)
    _passes: int = field(default=0, init=False)
    _tokens: int = field(default=0, init=False)
    _draft_ns: int = field(default=0, init=False)
    _accept_ns: int = field(default=0, init=False)
    _last: _Pass | None = field(default=None, init=False)

    @property
    def stats(self) -> SpeculationStats:
        """So far."""
        return SpeculationStats(self._passes, self._tokens, self._drafters, self._draft_ns, self._accept_ns)

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
        most = k if self.pacer is None else min(k, self.pacer.most(k))
        found = self.drafter.propose(tokens, most) if most > 0 else ()
        try:
            drafts = as_tree(found).first(most).within(vocab)
        except TypeError:
            refuse(f"drafter {self.drafter.name}", shown(found), "token ids", "Return a list of ids, or a DraftTree.")
        self._draft_ns += perf_counter_ns() - started
        return drafts

    def ran(self, rows: int, drafts: DraftTree, ns: int) -> None:
        """Count a pass.

        Args:
            rows: AR of its graph.
            drafts: those that it ran.
            ns: its time.
        """
        drafter = None
        if len(drafts):
            drafter = self._drafters.setdefault(self.drafter.name, DrafterStats())
            drafter.proposals += 1
            drafter.proposed += len(drafts)
        self._passes += 1
        self._last = _Pass(rows, drafts, ns, drafter)

    def accept(self, drafts: Sequence[int]) -> None:
        """Count the next drafts of the last pass, which were right."""
        last = self._last
        if last is None or last.drafter is None:
            return
        last.right += len(drafts)
        last.drafter.accepted += len(drafts)
        if not last.drafts.is_chain:
            path = last.drafts.path(drafts, last.node)
            last.node = path[-1] if path else last.node
            last.drafter.branched += len({*path} - {*last.drafts.trunk_nodes})

    def chose(self, ns: int) -> None:
        """Count a token after the first, and the time to choose it."""
        self._tokens += 1
        self._accept_ns += ns

    def finish(self) -> None:
        """The text has ended: as `end`, and its session is let go."""
        self.end()
        if self.reader is not None:
            self.reader.session = None

    def end(self) -> None:
        """Tell drafter and pacer about the last pass, if they do not know yet."""
        last, self._last = self._last, None
        if last is None:
            return
        started = perf_counter_ns()
        if len(last.drafts):
            self.drafter.accepted(last.right)
        if self.pacer is not None:
            self.pacer.ran(last.rows, last.right + 1, last.ns)
        self._draft_ns += perf_counter_ns() - started
