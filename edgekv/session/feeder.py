"""Brings the logits after a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from edgekv.kv import CacheStats
from edgekv.session.batch import Offer
from edgekv.session.graphs import StepTimes
from edgekv.session.request import Request
from edgekv.session.speculation import SpeculationStats


class Feeder:
    """Runs what is new of a text, in steps of its own or in a pass of several generations.

    Attributes:
        text: prompt and output.
    """

    def __init__(self, request: Request, prompt: Sequence[int]) -> None:
        """Args: request: begun. prompt: token ids."""
        self.text = list(prompt)
        self._request = request
        self._unfed = list(prompt)  # tokens to run in the next step
        self._ready: NDArray[Any] | None = None  # from a pass of several generations

    @property
    def unfed_tokens(self) -> int:
        """Tokens that the next step has to run."""
        return len(self._unfed)

    @property
    def needs_pass(self) -> bool:
        """Whether the next logits need an inference."""
        return self._ready is None

    @property
    def speculation(self) -> SpeculationStats | None:
        """What drafts brought; None without them."""
        return None

    def push(self, token: int, ns: int) -> None:
        """Continue the text with a token, which took so long to choose."""
        self.text.append(token)
        self._unfed.append(token)

    def prefill(self, most: int) -> bool:
        """Run a piece of the prompt; see `Request.prefill`."""
        more = self._request.prefill(self.text, most)
        self._unfed = self.text[self._request.known_tokens :]
        return more

    def first(self) -> NDArray[Any]:
        """The logits after the prompt, as integers `[V]`, valid until the next step. Raises: as `Request.feed`."""
        logits = self._request.feed(self._unfed)
        self._unfed.clear()
        return logits

    def next(self) -> NDArray[Any]:
        """The logits after the text, as `first`. Raises: as `Request.feed`."""
        ready, self._ready = self._ready, None
        logits = self._run() if ready is None else ready
        self._unfed.clear()
        return logits

    def offer(self) -> Offer | None:
        """What a pass of several generations can run; None if it needs none, or one of its own."""
        session = self._request.batched(len(self._unfed)) if self.needs_pass else None
        return None if session is None else Offer(session, self._unfed[0])

    def receive(self, offer: Offer, logits: NDArray[Any], before: CacheStats, times: StepTimes) -> None:
        """Take the logits of such a pass; see `Generation.receive`."""
        self._request.ran(offer.token, offer.session, before, times)
        self._ready = logits

    def end(self) -> None:
        """The generation has ended."""

    def _run(self) -> NDArray[Any]:
        return self._request.feed(self._unfed)
