"""How many tokens of a draft are right, by the context that it rests on."""

from __future__ import annotations

_DECAY = 0.95
"""Weight of a draft after the next one of its kind."""
_PRIOR_WEIGHT = 2.0
_PRIOR = ((0.6, 0.6), (0.25, 0.65), (0.6, 0.78), (0.8, 0.87), (0.85, 0.9), (0.95, 0.96))
"""How likely the first token of a draft is right, and a further one after right ones, by the draft's class: as measured
with prompt lookup in SmolLM2-135M (`benchmarks.speculation`)."""
MOST_TOKENS = 31
"""Tokens of a draft that are counted."""


class Acceptance:
    """Right tokens of the drafts of one drafter, with less weight the longer ago.

    Drafts are divided by the matched tokens of context: none, 1, 2 to 3, 4 to 7, 8 to 15, and more.
    """

    def __init__(self) -> None:
        """Start with what is usual."""
        self._right = [[_PRIOR_WEIGHT * first * more**n for n in range(MOST_TOKENS)] for first, more in _PRIOR]
        self._weight = [_PRIOR_WEIGHT] * len(_PRIOR)

    def add(self, support: int, right: int) -> None:
        """Count a draft whose first `right` tokens were right."""
        kind = _kind(support)
        self._weight[kind] = self._weight[kind] * _DECAY + 1
        self._right[kind] = [each * _DECAY + (at < right) for at, each in enumerate(self._right[kind])]

    def expected(self, support: int, tokens: int) -> float:
        """How many of a draft's first tokens are expected to be right."""
        kind = _kind(support)
        return sum(self._right[kind][:tokens]) / self._weight[kind]


def _kind(support: int) -> int:
    return min(support.bit_length(), len(_PRIOR) - 1)
