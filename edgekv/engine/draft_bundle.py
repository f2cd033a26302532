"""Drafts of a smaller bundle with the same tokenizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from time import perf_counter_ns

from edgekv.engine.loaded import LoadedBundle
from edgekv.errors import UsageError
from edgekv.spec.text import begins_with

_SAMPLES = 15
_FIX = "Give a bundle of the same family, such as a smaller model with the same tokenizer.json."


class BundleDrafter:
    """Proposes the tokens that a smaller model finds most likely.

    Of a few sessions of that model it uses the one that holds the text: answers that take turns keep their caches, and
    rejected tokens are rewound.

    Attributes:
        name: for statistics.
        support: 0: a proposal rests on no match.
        ns_per_token: median time of a proposed token; 1 before the first.
    """

    name = "draft"
    support = 0

    def __init__(self, draft: LoadedBundle, vocab: int) -> None:
        """Draft with a bundle.

        Args:
            draft: open while this is used, and used by nothing else meanwhile.
            vocab: number of the target's logits; a draft ends before a token beyond it.
        """
        self.ns_per_token = 1.0
        self._sessions = draft.draft_sessions
        self._first = [] if draft.cache.sink is None else [*draft.cache.sink.tokens]
        self._vocab = vocab
        self._samples: deque[float] = deque(maxlen=_SAMPLES)

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        """At most `k` tokens; none where the text is longer than the draft's context.

        Raises:
            EngineError: the runtime failed.
        """
        started = perf_counter_ns()
        whole = [*tokens]
        if not begins_with(whole, self._first):
            whole = [*self._first, *whole]
        session = self._sessions.of(whole)
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
        if found:
            self._samples.append((perf_counter_ns() - started) / len(found))
            self.ns_per_token = median(self._samples)
        return found

    def accepted(self, n: int) -> None:
        """Nothing to note: the next proposal compares the whole text."""


def check_draft(target: LoadedBundle, draft: LoadedBundle) -> None:
    """Refuse a bundle that cannot draft for another.

    Raises:
        UsageError: its tokenizer or end-of-sequence tokens differ, it drops old tokens, or it is the target itself.
    """
    field = "draft bundle"
    if draft is target:
        raise UsageError(field, got="the model itself", expected="another, smaller one", fix=_FIX)
    ours, theirs = (each.tokenizer.get_vocab(with_added_tokens=True) for each in (target, draft))
    if ours != theirs:
        differing = len({*ours.items()} ^ {*theirs.items()})
        found = f"{draft.bundle.path}: a tokenizer with {len(theirs):,} tokens, {differing:,} entries differ"
        raise UsageError(field, got=found, expected=f"the {len(ours):,} tokens of {target.bundle.path}", fix=_FIX)
    if target.tokenizer.to_str() != draft.tokenizer.to_str():
        found = f"{draft.bundle.path}: a tokenizer that divides texts in another way"
        raise UsageError(field, got=found, expected=f"that of {target.bundle.path}", fix=_FIX)
    if draft.cache.room_tokens is None:
        fix = "Load it with the policy fail."
        raise UsageError(field, got="a context policy that drops tokens", expected="the policy fail", fix=fix)
