"""Drafters for tests, and generations with them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import edgekv
from edgekv import SamplingParams
from edgekv.draft import Speculation
from edgekv.engine import Generation


class Oracle:
    """Proposes the true continuation of a text, of random length and with random errors."""

    name = "oracle"

    def __init__(self, text: Sequence[int], vocab: int, seed: int = 0, right: float = 0.85) -> None:
        """Args: text: prompt and output. vocab: of the errors. seed: of the errors. right: how likely a draft is so."""
        self.told: list[int] = []  # drafts accepted of each proposal
        self._text = list(text)
        self._vocab = vocab
        self._right = right
        self._random = random.Random(seed)

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        at, chance = len(tokens), self._random
        length = k if self._right == 1 else chance.randint(0, k)
        true = self._text[at : at + length]
        return [token if chance.random() < self._right else chance.randrange(self._vocab) for token in true]

    def accepted(self, n: int) -> None:
        self.told.append(n)


def with_drafts(
    model: edgekv.Model,
    prompt: Sequence[int],
    params: SamplingParams,
    speculation: Speculation | None,
    *,
    sequence: int | None = None,
    **options: Any,
) -> Generation:
    """As `model.generate`, with any speculation.

    Args:
        model: the model.
        prompt: token ids.
        params: how to sample.
        speculation: what drafts; None for plain decoding.
        sequence: its id; None for the model's own.
        options: `processors`, `return_logits`, `cache_salt`.
    """
    return model.generate(prompt, params, sequence=sequence, speculate=speculation, **options)
