"""Brings the logits after a text that speculates."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any

from numpy.typing import NDArray

from edgekv.draft import DraftTree
from edgekv.session.batch import Offer
from edgekv.session.constraint import Constraint
from edgekv.session.feeder import Feeder
from edgekv.session.request import Request
from edgekv.session.speculation import Speculation, SpeculationStats


class DraftingFeeder(Feeder):
    """Runs drafts behind what is new, and has the logits of those that prove right without another step."""

    def __init__(
        self,
        request: Request,
        prompt: Sequence[int],
        new_tokens: int,
        speculation: Speculation,
        constraint: Constraint | None,
    ) -> None:
        """Draft for a new text.

        Args:
            request: begun.
            prompt: token ids.
            new_tokens: of the output at most.
            speculation: drafts.
            constraint: of the output, up to its last token; None for free text.
        """
        super().__init__(request, prompt)
        self._prompt_tokens, self._new_tokens = len(prompt), new_tokens
        self._speculation = speculation
        self._constraint = constraint

    @property
    def needs_pass(self) -> bool:
        return super().needs_pass and not self._request.has_run(self._unfed)

    def offer(self) -> Offer | None:
        return None

    @property
    def speculation(self) -> SpeculationStats | None:
        return self._speculation.stats

    def push(self, token: int, ns: int) -> None:
        if len(self.text) > self._prompt_tokens:
            self._speculation.chose(ns)
        super().push(token, ns)

    def end(self) -> None:
        self._speculation.end()

    def _run(self) -> NDArray[Any]:
        request, unfed = self._request, self._unfed
        known = request.known_tokens
        logits = request.take(unfed)
        right = request.known_tokens - known
        self._speculation.accept(unfed[:right])
        if logits is not None:
            return logits
        del unfed[:right]
        useful = self._prompt_tokens + self._new_tokens - len(self.text) - 1
        drafts = self._drafts(min(request.draft_room(len(unfed)), useful))
        started = perf_counter_ns()
        logits = request.verify(unfed, drafts) if len(drafts) else request.feed(unfed)
        self._speculation.ran(request.ar, drafts, perf_counter_ns() - started)
        return logits

    def _drafts(self, room: int) -> DraftTree:
        """What the next pass checks, at most `room` tokens."""
        drafts = self._speculation.propose(self.text, room, self._request.vocab)
        if self._constraint is not None and len(drafts):
            return DraftTree.chain(self._constraint.continued(drafts.trunk().tokens, room))
        return drafts if self._request.takes_trees else drafts.trunk()
