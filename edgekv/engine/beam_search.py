"""Beam search over the logits of next tokens: the algorithm of Hugging Face transformers."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import UsageError
from edgekv.text.params import BeamParams
from edgekv.text.sampler import most_likely

_MAX_DECADES = 300  # within float64


def _refuse(field: str, got: object, expected: str, fix: str) -> None:
    raise UsageError(field, got=got, expected=expected, fix=fix)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence.

    Attributes:
        tokens: the new tokens, including the end-of-sequence token.
        score: sum of the tokens' log-probabilities, divided by n**length_penalty for n tokens.
    """

    tokens: tuple[int, ...]
    score: float


class BeamSearch:
    """The state of one search: receives the logits of all beams and selects the beams to run next.

    As `_beam_search` of transformers 5, for one prompt: of all continuations of all beams the best
    max(2, 1 + number of eos) * num_beams are candidates. Those among the first `num_beams` that end are finished;
    the best that do not end are the next beams. Sums are in float64.

    Attributes:
        params: as given.
        eos: tokens that end a sequence.
        max_new_tokens: the maximum length of a sequence.
        length: current length of the sequences, in new tokens.
        parents: for each next beam, the beam that it continues.
        tokens: the new token of each next beam.
        finished: the best `num_beams` finished sequences so far, best first.
        done: whether the search has ended.
    """

    def __init__(self, params: BeamParams, *, eos: Collection[int], max_new_tokens: int, vocab: int) -> None:
        """Start a search.

        Raises:
            UsageError: `max_new_tokens` is below 1, the vocabulary has fewer tokens than there are candidates, or
                length**length_penalty overflows.
        """
        if max_new_tokens < 1:
            _refuse("max_new_tokens", max_new_tokens, "at least 1", "Ask for a token or more.")
        self._candidates = max(2, 1 + len(set(eos))) * params.num_beams
        if self._candidates > vocab:
            most = vocab // max(2, 1 + len(set(eos)))
            _refuse("num_beams", params.num_beams, f"at most {most} with a vocabulary of {vocab}", "Use fewer beams.")
        if abs(params.length_penalty) * math.log10(max_new_tokens) > _MAX_DECADES:
            expected = f"one with which {max_new_tokens}**length_penalty is a number"
            _refuse("length_penalty", params.length_penalty, expected, "Use one from -10 to 10.")
        self.params = params
        self.eos = frozenset(eos)
        self.max_new_tokens = max_new_tokens
        self.length = 0
        self._sums: NDArray[np.float64] = np.zeros(1)
        self._sequences: list[tuple[int, ...]] = [()]
        self.parents: list[int] = []
        self.tokens: list[int] = []
        self.finished: list[Hypothesis] = []
        self.done = False

    @property
    def best(self) -> tuple[Hypothesis, ...]:
        """The best `num_return_sequences` finished sequences so far, best first."""
        return tuple(self.finished[: self.params.num_return_sequences])

    def advance(self, logits: NDArray[Any]) -> None:
        """Process the logits of the beams, `[1, V]` after the prompt and `[num_beams, V]` later."""
        if self.done:
            raise ValueError("advance: got a search that is done; expected one that has not ended")
        if len(logits) != len(self._sums):
            raise ValueError(f"logits: got {len(logits)} rows; expected {len(self._sums)}, one for each beam")
        sums = self._sums[:, None] + log_softmax(logits)
        chosen = most_likely(sums.ravel(), self._candidates)
        parents, tokens = (part.tolist() for part in np.divmod(chosen, logits.shape[1]))
        values = sums.ravel()[chosen]
        self.length += 1
        last = self.length == self.max_new_tokens
        ends = [last or token in self.eos for token in tokens]
        self._finish([i for i in range(self.params.num_beams) if ends[i]], parents, tokens, values)
        running = [i for i, ended in enumerate(ends) if not ended][: self.params.num_beams]
        self.parents = [parents[i] for i in running]
        self.tokens = [tokens[i] for i in running]
        self._sequences = [(*self._sequences[parents[i]], tokens[i]) for i in running]
        self._sums = values[running]
        self.done = last or self._enough()

    def _finish(
        self, which: Sequence[int], parents: Sequence[int], tokens: Sequence[int], sums: NDArray[np.float64]
    ) -> None:
        divisor = self._divisor(self.length)
        ended = [Hypothesis((*self._sequences[parents[i]], tokens[i]), float(sums[i]) / divisor) for i in which]
        ranked = sorted(self.finished + ended, key=lambda hypothesis: -hypothesis.score)
        self.finished = ranked[: self.params.num_beams]

    def _enough(self) -> bool:
        """Whether `num_beams` sequences are finished and no better one is expected."""
        params = self.params
        if len(self.finished) < params.num_beams:
            return False
        if params.early_stopping is True or params.num_beams == 1:
            return True
        hoping = params.early_stopping == "never" and params.length_penalty > 0
        length = self.max_new_tokens if hoping else self.length
        return bool(self._sums[0] / self._divisor(length) <= self.finished[-1].score)

    def _divisor(self, length: int) -> float:
        return float(length**self.params.length_penalty)


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Log-probabilities of logits `[..., V]`, in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
