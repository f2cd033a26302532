"""A smaller model with the same tokenizer that drafts for another."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter_ns

from edgekv.bundle import Bundle
from edgekv.engine.pool import SessionPool
from edgekv.engine.session import Session, common_tokens
from edgekv.errors import UsageError
from edgekv.spec.text import begins_with
from edgekv.text.texts import Texts

_SESSIONS = 4
_REJECTED = 64
"""Tokens at the end of a session that may differ from its text: drafts that were wrong."""
_SAMPLES = 15
_FIX = "Give a bundle of the same family, such as a smaller model with the same tokenizer.json."


@dataclass(slots=True, eq=False, weakref_slot=True)
class DraftModel:
    """What a model offers to others that it drafts for. Not thread-safe.

    Attributes:
        bundle: its bundle.
        texts: its tokenizer.
        pool: its sessions.
    """

    bundle: Bundle
    texts: Texts
    pool: SessionPool
    _ids: list[int | None] = field(default_factory=lambda: [None])  # least recently used first; None is the own session

    def check(self, target: DraftModel) -> None:
        """Refuse to draft for another model.

        Raises:
            UsageError: its tokenizer differs, this one drops old tokens, or it is the target itself.
        """
        name = "draft bundle"
        if self is target:
            raise UsageError(name, got="the model itself", expected="another, smaller one", fix=_FIX)
        ours, theirs = (each.texts.tokenizer for each in (target, self))
        our_ids, their_ids = (each.get_vocab(with_added_tokens=True) for each in (ours, theirs))
        if our_ids != their_ids:
            differing = len({*our_ids.items()} ^ {*their_ids.items()})
            found = f"{self.bundle.path}: a tokenizer with {len(their_ids):,} tokens, {differing:,} entries differ"
            raise UsageError(name, got=found, expected=f"the {len(our_ids):,} tokens of {target.bundle.path}", fix=_FIX)
        if ours.to_str() != theirs.to_str():
            found = f"{self.bundle.path}: a tokenizer that divides texts in another way"
            raise UsageError(name, got=found, expected=f"that of {target.bundle.path}", fix=_FIX)
        if self.pool.own.cache.room_tokens is None:
            fix = "Load it with the policy fail."
            raise UsageError(name, got="a context policy that drops tokens", expected="the policy fail", fix=fix)

    def forget(self) -> None:
        """Free the caches of the texts that it drafted for, but its own, which is emptied. None if it was closed."""
        ids, self._ids = self._ids, [None]
        if not self.pool.is_closed:
            for each in ids:
                if each is not None:
                    self.pool.free(each)
            self.pool.own.reset()

    def drafter(self, vocab: int) -> BundleDrafter:
        """What drafts for one text; see `BundleDrafter`."""
        return BundleDrafter(self, vocab)

    def session_of(self, tokens: Sequence[int]) -> Session:
        """The session that holds the beginning of a text, so that texts which take turns keep their caches.

        If none does: an empty or a new one while there are fewer than four and memory for it, else the one that was
        not used for the longest time.

        Raises:
            UsageError: the model was closed.
        """
        if self.pool.is_closed:
            raise UsageError("draft", got="a closed model", expected="an open one", fix="Load the bundle again.")
        held = {each: session for each in self._ids if (session := self.pool.touch(each)) is not None}
        chosen = self._holder(held, tokens)
        self._ids = [*(each for each in held if each != chosen), chosen]
        return self.pool.own if chosen is None else held.get(chosen) or self.pool.get_or_create(chosen)

    def _holder(self, held: dict[int | None, Session], tokens: Sequence[int]) -> int | None:
        common = {each: common_tokens(session.tokens, tokens) for each, session in held.items()}
        best = max(common, key=common.__getitem__)
        if held[best].is_empty or (common[best] > 0 and len(held[best].tokens) - common[best] <= _REJECTED):
            return best
        empty = next((each for each, session in held.items() if session.is_empty), best)
        if empty != best:
            return empty
        if len(held) < _SESSIONS and self.pool.has_room:
            return next(number for number in range(_SESSIONS) if number not in held)
        return next(iter(held))


class ModelDrafter:
    """What all models that draft for one text have in common.

    Attributes:
        name: for statistics.
        support: 0: a proposal rests on no match.
        ns_per_token: median time of a proposed token; 1 before the first.
    """

    name = "draft"
    support = 0

    def __init__(self, vocab: int) -> None:
        """Args: vocab: number of the target's logits; a draft ends before a token beyond it."""
        self.ns_per_token = 1.0
        self._vocab = vocab
        self._samples: deque[float] = deque(maxlen=_SAMPLES)

    def _timed(self, started_ns: int, proposed: list[int]) -> list[int]:
        """A proposal, whose time counts if it has tokens."""
        if proposed:
            self._samples.append((perf_counter_ns() - started_ns) / len(proposed))
            self.ns_per_token = median(self._samples)
        return proposed


class BundleDrafter(ModelDrafter):
    """Proposes the tokens that a smaller model finds most likely; rejected tokens are rewound."""

    def __init__(self, model: DraftModel, vocab: int) -> None:
        """Draft with a model.

        Args:
            model: open while this is used, and used by nothing else meanwhile.
            vocab: as for `ModelDrafter`.
        """
        super().__init__(vocab)
        self._model = model
        sink = model.pool.own.cache.sink
        self._first = [] if sink is None else [*sink.tokens]

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        """At most `k` tokens; none where the text is longer than the draft's context.

        Raises:
            EngineError: the runtime failed.
        """
        started = perf_counter_ns()
        whole = [*tokens]
        if not begins_with(whole, self._first):
            whole = [*self._first, *whole]
        session = self._model.session_of(whole)
        held = session.reuse(whole)
        room = session.cache.room_tokens
        most = k if room is None else min(k, room - (len(whole) - held) + 1)
        found: list[int] = []
        unfed = whole[held:]
        while len(found) < most:
            token = int(session.feed(unfed).argmax())
            if token >= self._vocab:
                break
            found.append(token)
            unfed = [token]
        return self._timed(started, found)

    def accepted(self, n: int) -> None:
        """No-op: the next proposal compares the whole text."""
