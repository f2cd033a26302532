"""Choosing the next token from logits."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import UsageError
from quant import Encoding


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose.

    Attributes:
        temperature: divides the logits; 0 chooses the most likely token, always.
        top_k: only the k most likely tokens; None for all.
        top_p: of those only the fewest whose probabilities reach p together; None for all.
        seed: of the random numbers; None draws one.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            _refuse("temperature", self.temperature, "a number from 0 on", "Use 0 for greedy, about 0.8 for variety.")
        if self.top_k is not None and self.top_k < 1:
            _refuse("top_k", self.top_k, "at least 1", "Leave it out to consider all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            _refuse("top_p", self.top_p, "above 0, at most 1", "Leave it out to consider all tokens.")
        if self.seed is not None and self.seed < 0:
            _refuse("seed", self.seed, "a whole number from 0 on", "Leave it out to draw one.")
        if self.greedy:
            for name in ("top_k", "top_p", "seed"):
                if getattr(self, name) is not None:
                    found = f"{getattr(self, name)} at temperature 0, where it changes nothing"
                    _refuse(name, found, "a temperature above 0", "Give a temperature such as 0.8, or leave it out.")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen."""
        return self.temperature == 0


def _refuse(field: str, found: object, wanted: str, fix: str) -> None:
    raise UsageError(field, got=found, expected=wanted, fix=fix)


class Sampler:
    """Chooses token after token; the same seed and logits give the same choices.

    Attributes:
        seed: of the random numbers, drawn if none was given; None if greedy.
    """

    def __init__(self, sampling: Sampling, encoding: Encoding) -> None:
        """Prepare for logits that are integers of this encoding."""
        self._sampling = sampling
        self._encoding = encoding
        self.seed: int | None = None
        if not sampling.greedy:
            self.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
            self._random = np.random.default_rng(self.seed)

    def __call__(self, logits: NDArray[Any]) -> int:
        """The next token, of integer logits `[V]`; of equally likely ones greedy choice takes the lowest id."""
        if self._sampling.greedy:
            return int(logits.argmax())  # the order of the integers is the order of the logits
        order, probabilities = self.distribution(logits)
        return int(order[np.searchsorted(probabilities.cumsum(), self._random.random() * probabilities.sum(), "right")])

    def distribution(self, logits: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The tokens that may be chosen, most likely first, and their probabilities, which sum up to 1."""
        kept = len(logits) if self._sampling.top_k is None else min(self._sampling.top_k, len(logits))
        order = np.argsort(-logits.astype(np.int64), kind="stable")[:kept]
        scaled = self._encoding.dequantize(logits[order]).astype(np.float64) / self._sampling.temperature
        weights = np.exp(scaled - scaled[0])
        probabilities = weights / weights.sum()
        if self._sampling.top_p is not None:
            before = probabilities.cumsum() - probabilities
            kept = int(np.count_nonzero(before < self._sampling.top_p))
            order, probabilities = order[:kept], probabilities[:kept] / probabilities[:kept].sum()
        return order, probabilities
