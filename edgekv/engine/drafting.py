"""A model that drafts for others, and for which others draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any
from weakref import WeakSet

from edgekv.bundle import Bundle
from edgekv.draft import AdaptiveDrafter, CorpusDrafter, DraftRecord, PromptLookup, Source, Speculation
from edgekv.engine.pool import SessionPool
from edgekv.engine.request import DEFAULT_CACHE
from edgekv.engine.session import Session, common_tokens
from edgekv.engine.speculation import ModelDrafter, SpeculationRun
from edgekv.errors import UsageError, refuse
from edgekv.runtime import BatchInvariance
from edgekv.spec.text import begins_with
from edgekv.text.texts import Texts

_SESSIONS = 4
_REJECTED = 64
"""Tokens at the end of a session that may differ from its text: drafts that were wrong."""
EXPORT_FIX = "Export it with --draft-rows 8."
_FIX = "Give a bundle of the same family, such as a smaller model with the same tokenizer.json."


@dataclass(slots=True, eq=False, weakref_slot=True)
class Drafting:
    """What a model has to do with drafts: it makes them for other models, and others for it. Not thread-safe.

    Attributes:
        bundle: its bundle.
        texts: its tokenizer.
        pool: its sessions.
        engine: name of what computes it.
        batch_invariance: whether that gives a token the same bits beside drafts as alone.
        rows: tokens per inference of the graphs that check drafts, ascending; none if there is no such graph.
        record: what speculation has measured.
    """

    bundle: Bundle
    texts: Texts
    pool: SessionPool
    engine: str
    batch_invariance: BatchInvariance
    rows: tuple[int, ...] = field(init=False)
    record: DraftRecord = field(default_factory=DraftRecord)
    _drafts: WeakSet[Any] = field(default_factory=WeakSet)  # models that have drafted for it
    _ids: list[int] = field(default_factory=lambda: [DEFAULT_CACHE])  # least recently used first

    def __post_init__(self) -> None:
        graphs = self.bundle.manifest.graphs
        self.rows = tuple(sorted({graph.ar for graph in graphs if graph.role == "verify"}))

    # ------------------------------------------------------------------ drafts for others

    def check_target(self, target: Drafting) -> None:
        """Refuse to draft for another model.

        Raises:
            UsageError: its tokenizer differs, this one drops old tokens, or it is the target itself.
        """
        name = "draft bundle"
        if self is target:
            raise UsageError(name, got="the model itself", expected="another, smaller one", fix=_FIX)
        ours, theirs = (model.texts.tokenizer for model in (target, self))
        our_ids, their_ids = (tokenizer.get_vocab(with_added_tokens=True) for tokenizer in (ours, theirs))
        if our_ids != their_ids:
            differing = len({*our_ids.items()} ^ {*their_ids.items()})
            got = f"{self.bundle.path}: a tokenizer with {len(their_ids):,} tokens, {differing:,} entries differ"
            raise UsageError(name, got=got, expected=f"the {len(our_ids):,} tokens of {target.bundle.path}", fix=_FIX)
        if ours.to_str() != theirs.to_str():
            got = f"{self.bundle.path}: a tokenizer that divides texts in another way"
            raise UsageError(name, got=got, expected=f"that of {target.bundle.path}", fix=_FIX)
        if self.pool.default.cache.room_tokens is None:
            fix = "Load it with the policy fail."
            raise UsageError(name, got="a context policy that drops tokens", expected="the policy fail", fix=fix)

    def forget(self) -> None:
        """Free the caches of the texts that it drafted for, but its own, which is emptied. None if it was closed."""
        ids, self._ids = self._ids, [DEFAULT_CACHE]
        if not self.pool.is_closed:
            for cache_id in ids:
                if cache_id != DEFAULT_CACHE:
                    self.pool.free(cache_id)
            self.pool.default.reset()

    def propose(self, tokens: Sequence[int], k: int, vocab: int, target: Session | None) -> list[int]:
        """See `Propose`: none where the text is longer than the context; rejected tokens are rewound.

        Raises:
            EngineError: the runtime failed.
            UsageError: the model was closed.
        """
        whole, sink = [*tokens], None if self.pool.is_closed else self.pool.default.cache.sink
        if sink is not None and not begins_with(whole, [*sink.tokens]):
            whole = [*sink.tokens, *whole]
        session = self.session_of(whole)
        held = session.reuse(whole)
        room = session.cache.room_tokens
        max_drafts = k if room is None else min(k, room - (len(whole) - held) + 1)
        drafts: list[int] = []
        unfed = whole[held:]
        while len(drafts) < max_drafts:
            token = int(session.feed(unfed).argmax())
            if token >= vocab:
                break
            drafts.append(token)
            unfed = [token]
        return drafts

    def session_of(self, tokens: Sequence[int]) -> Session:
        """The session that holds the beginning of a text, so that texts which take turns keep their caches.

        If none does: an empty or a new one while there are fewer than four and memory for it, else the one that was
        not used for the longest time.

        Raises:
            UsageError: the model was closed.
        """
        if self.pool.is_closed:
            raise UsageError("draft", got="a closed model", expected="an open one", fix="Load the bundle again.")
        held = {cache_id: session for cache_id in self._ids if (session := self.pool.touch(cache_id)) is not None}
        chosen = self._holder(held, tokens)
        self._ids = [*(number for number in held if number != chosen), chosen]
        return held.get(chosen) or self.pool.get_or_create(chosen)

    def _holder(self, held: dict[int, Session], tokens: Sequence[int]) -> int:
        common = {number: common_tokens(session.tokens, tokens) for number, session in held.items()}
        best = max(common, key=common.__getitem__)
        if held[best].is_empty or (common[best] > 0 and len(held[best].tokens) - common[best] <= _REJECTED):
            return best
        empty = next((number for number, session in held.items() if session.is_empty), best)
        if empty != best:
            return empty
        if len(held) < _SESSIONS and self.pool.has_room:
            return next(number for number in range(_SESSIONS) if number not in held)
        return next(iter(held))

    # ------------------------------------------------------------------ drafts of others

    @property
    def vocab(self) -> int:
        """Number of its logits."""
        return self.bundle.manifest.model.vocab

    @property
    def only_chains(self) -> str:
        """What does not let drafts for it branch; empty if they may."""
        if (rule := self.bundle.manifest.model.delta_rule) is not None:
            return f"layers with {rule.noun}, whose tokens follow each other"
        is_equal = self.batch_invariance == "equal"
        return "" if is_equal else f"the engine {self.engine}, whose sums depend on the columns of tokens"

    def close(self) -> None:
        """Let models that drafted for it free what they hold for its texts."""
        for draft in self._drafts:
            draft.forget()
        self._drafts.clear()

    def check(self, speculation: Speculation) -> None:
        """Refuse what the bundle cannot do.

        Raises:
            UsageError: a named drafter in a bundle without verify graphs or on an engine that cannot check drafts, more
                drafts than the graphs have room for, a tree where drafts may not branch, or a draft bundle with another
                tokenizer.
        """
        rows = self.rows
        if not rows and speculation.mode not in ("auto", "off"):
            refuse("mode", f"{speculation.mode} in a bundle without verify graphs", "verify graphs", EXPORT_FIX)
        if rows and self.batch_invariance == "unequal" and speculation.mode not in ("auto", "off"):
            got = f"{speculation.mode} on the engine {self.engine}, whose results depend on the number of tokens"
            wanted_engine = "an engine that gives a token the same bits beside others, such as htp, or cpu on x86"
            refuse("mode", got, wanted_engine, "Use auto, which drafts nothing here, or leave it out.")
        if rows and speculation.tokens is not None and speculation.tokens >= rows[-1]:
            got = f"{speculation.tokens} drafts of a pass"
            most = f"at most {rows[-1] - 1}: the largest verify graph has {rows[-1]} rows, one of them no draft"
            fix = f"Give less, or export with --draft-rows {speculation.tokens + 1}."
            refuse("tokens", got, most, fix)
        if rows and speculation.tree and self.only_chains:
            wanted_bits = (
                "a model and an engine that give a token the same bits in any column, such as attention on htp"
            )
            refuse("tree", self.only_chains, wanted_bits, "Leave it out.")
        for name, source, fix in (
            ("corpus", speculation.corpus, "Open it with Model.open_corpus."),
            ("draft", speculation.draft, "Load it with edgekv.load."),
        ):
            if isinstance(source, str | PathLike):
                refuse(name, f"the path {fspath(source)!r}", "what it leads to", fix)
        if speculation.draft is not None and not isinstance(speculation.draft, str):
            speculation.draft.draft_model.check_target(self)

    def begin(self, speculation: Speculation) -> SpeculationRun | None:
        """The speculation of one text; None for none, as with `auto` in a bundle without verify graphs.

        Raises:
            UsageError: see `check`.
        """
        if speculation.mode == "off":
            return None
        self.check(speculation)
        if speculation.drafter is not None:
            return SpeculationRun(speculation.drafter, speculation.tokens)
        if not self.rows:
            return None
        sources: list[Source] = []
        reader: ModelDrafter | None = None
        if speculation.mode in ("lookup", "auto"):
            sources.append(PromptLookup(tree=speculation.tree))
        if speculation.corpus is not None and not isinstance(speculation.corpus, str):
            sources.append(CorpusDrafter(speculation.corpus, tree=speculation.tree))
        if speculation.draft is not None and not isinstance(speculation.draft, str):
            draft = speculation.draft.draft_model
            self._drafts.add(draft)
            reader = ModelDrafter(draft.propose, self.vocab)
            sources.append(reader)
        most = speculation.tokens or self.rows[-1] - 1
        if speculation.mode == "auto":
            adaptive = AdaptiveDrafter(sources, self.rows, self.record, most)
            return SpeculationRun(adaptive, record=self.record, reader=reader)
        (source,) = sources
        return SpeculationRun(source, most, reader=reader)
