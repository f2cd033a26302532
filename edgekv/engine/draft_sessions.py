"""Sessions of a draft model, so that texts which take turns keep their caches."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.engine.pool import SessionPool
from edgekv.engine.session import Session, common_tokens

_SESSIONS = 4
_REJECTED = 64
"""Tokens at the end of a session that may differ from its text: drafts that were wrong."""


class DraftSessions:
    """Chooses among the pool's own session and a few others. Not thread-safe."""

    def __init__(self, pool: SessionPool) -> None:
        """Start with the pool's own session."""
        self._pool = pool
        self._ids: list[int | None] = [None]  # the least recently used first; None is the own session

    def of(self, tokens: Sequence[int]) -> Session:
        """The session that holds the beginning of a text.

        If none does: an empty or a new one while there are fewer than four and memory for it, else the one that was
        not used for the longest time.
        """
        held = {each: session for each in self._ids if (session := self._pool.touch(each)) is not None}
        chosen = self._holder(held, tokens)
        self._ids = [*(each for each in held if each != chosen), chosen]
        return self._pool.own if chosen is None else held.get(chosen) or self._pool.get_or_create(chosen)

    def _holder(self, held: dict[int | None, Session], tokens: Sequence[int]) -> int | None:
        common = {each: common_tokens(session.tokens, tokens) for each, session in held.items()}
        best = max(common, key=common.__getitem__)
        if held[best].is_empty or (common[best] > 0 and len(held[best].tokens) - common[best] <= _REJECTED):
            return best
        empty = next((each for each, session in held.items() if session.is_empty), best)
        if empty != best:
            return empty
        if len(held) < _SESSIONS and self._pool.has_room:
            return next(number for number in range(_SESSIONS) if number not in held)
        return next(iter(held))
