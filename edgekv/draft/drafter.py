"""What guesses the next tokens, and what decides how many to guess."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgekv.draft.tree import DraftTree


class Drafter(Protocol):
    """Guesses the tokens that follow a text. The text never depends on the guesses: wrong ones only cost time."""

    @property
    def name(self) -> str:
        """Who made the last proposal, for statistics. A drafter that asks others gives the name of the one it took."""

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int] | DraftTree:
        """Tokens that may follow, at most k of them, in one continuation or several; none if it has no guess.

        Args:
            tokens: the whole text, prompt and output. Within one generation it only grows.
            k: at least 1.
        """

    def accepted(self, n: int) -> None:
        """So many tokens of the last proposal were right; called once after each proposal that was not empty."""


class Pacer(Protocol):
    """Decides how many tokens to guess, by what guesses brought and what passes cost."""

    def most(self, k: int) -> int:
        """How many drafts the next pass may have, 0 to k; with 0 no drafter is asked."""

    def ran(self, rows: int, tokens: int, ns: int) -> None:
        """A pass is over.

        Args:
            rows: AR of its graph; 1 for a decode step.
            tokens: that it brought, at least 1.
            ns: its time within the runtime and around it, without that of drafters and sampling.
        """
