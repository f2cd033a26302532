"""Beam search over any scorer of next tokens: the algorithm of Hugging Face transformers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import UsageError

EarlyStopping = bool | Literal["never"]
_MAX_DECADES = 300  # within float64


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """How to search.

    Attributes:
        num_beams: sequences that are continued side by side. A single one is greedy choice, which ends with its
            first end-of-sequence token.
        num_return_sequences: finished sequences to return, at most `num_beams`.
        length_penalty: a finished sequence of n new tokens scores the sum of its log-probabilities divided by
            n**length_penalty; above 0 favours longer ones.
        early_stopping: True ends with `num_beams` finished sequences. False goes on while the best beam, if it
            ended now, would score above the worst of them; "never" judges it, if `length_penalty` is above 0, as
            if it reached the greatest length at its present sum.
    """

    num_beams: int
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        if self.num_beams < 1:
            _refuse("num_beams", self.num_beams, "at least 1", "Use 4, or leave it out.")
        if not 1 <= self.num_return_sequences <= self.num_beams:
            wanted = f"1 to {self.num_beams}, the number of beams"
            _refuse("num_return_sequences", self.num_return_sequences, wanted, "Ask for fewer, or use more beams.")
        if not math.isfinite(self.length_penalty):
            _refuse("length_penalty", self.length_penalty, "a finite number", "Use 1.0.")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            _refuse("early_stopping", repr(self.early_stopping), "True, False or 'never'", "Leave it out for False.")


def refuse_sampling(
    temperature: float, top_k: int | None, top_p: float | None, seed: int | None, stop: Sequence[str]
) -> None:
    """Refuse what beam search cannot take.

    Raises:
        UsageError: naming the first option that was given.
    """
    given = {"temperature": temperature or None, "top_k": top_k, "top_p": top_p, "seed": seed, "stop": stop or None}
    fix = "Leave it out: beam search draws nothing, and its text is known at its end alone."
    _refuse_given(given, "with num_beams", fix)


def refuse_beam_options(
    num_return_sequences: int | None, length_penalty: float | None, early_stopping: EarlyStopping | None
) -> None:
    """Refuse what means nothing without beams.

    Raises:
        UsageError: naming the first option that was given.
    """
    given = {
        "num_return_sequences": num_return_sequences,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
    }
    _refuse_given(given, "without num_beams", "Leave it out, or give num_beams too.")


def _refuse_given(given: Mapping[str, object], condition: str, fix: str) -> None:
    for name, value in given.items():
        if value is not None:
            _refuse(name, f"{value} {condition}", "nothing", fix)


def _refuse(field: str, found: object, wanted: str, fix: str) -> None:
    raise UsageError(field, got=found, expected=wanted, fix=fix)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence.

    Attributes:
        tokens: the new ones, the end-of-sequence token included.
        score: sum of their log-probabilities, divided by their number to the power of `length_penalty`.
    """

    tokens: tuple[int, ...]
    score: float


class Scorer(Protocol):
    """Whatever computes logits: it keeps one state for each beam."""

    def first(self) -> NDArray[Any]:
        """Logits `[1, V]` behind the prompt."""

    def next(self, parents: Sequence[int], tokens: Sequence[int]) -> NDArray[Any]:
        """Logits `[beams, V]` after beam i has become what beam `parents[i]` was, and taken in `tokens[i]`.

        Behind the prompt all parents are 0.
        """


class BeamSearch:
    """The state of one search, told log-probabilities and asked for the beams to run next.

    As `_beam_search` of transformers 5, for one prompt: of all continuations of all beams the best
    max(2, 1 + number of eos) * num_beams are candidates. Those among the first `num_beams` that end are finished;
    the best that do not end are the next beams. Sums are in float64.

    Attributes:
        options: as given.
        eos: tokens that end a sequence.
        max_new_tokens: the greatest length of a sequence.
        length: of the sequences now, in new tokens.
        parents: of the next beams, the beams that they continue.
        tokens: their new tokens.
        finished: the best `num_beams` finished sequences so far, best first.
        done: whether no beam is to be run any more.
    """

    def __init__(self, options: BeamOptions, *, eos: Collection[int], max_new_tokens: int, vocab: int) -> None:
        """Begin a search.

        Raises:
            UsageError: `max_new_tokens` is below 1, the vocabulary has fewer tokens than there are candidates, or
                a length to the power of the penalty is no number any more.
        """
        if max_new_tokens < 1:
            _refuse("max_new_tokens", max_new_tokens, "at least 1", "Ask for a token or more.")
        self._candidates = max(2, 1 + len(set(eos))) * options.num_beams
        if self._candidates > vocab:
            most = vocab // max(2, 1 + len(set(eos)))
            _refuse("num_beams", options.num_beams, f"at most {most} with a vocabulary of {vocab}", "Use fewer beams.")
        if abs(options.length_penalty) * math.log10(max_new_tokens) > _MAX_DECADES:
            wanted = f"one with which {max_new_tokens}**length_penalty is a number"
            _refuse("length_penalty", options.length_penalty, wanted, "Use one from -10 to 10.")
        self.options = options
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
        return tuple(self.finished[: self.options.num_return_sequences])

    def advance(self, logits: NDArray[Any]) -> None:
        """Take in the logits of the beams, `[1, V]` behind the prompt and `[num_beams, V]` later."""
        if self.done:
            raise ValueError("advance: got a search that is done; expected one that goes on")
        if len(logits) != len(self._sums):
            raise ValueError(f"logits: got {len(logits)} rows; expected {len(self._sums)}, one for each beam")
        sums = self._sums[:, None] + log_softmax(logits)
        chosen = _best(sums.ravel(), self._candidates)
        parents, tokens = (part.tolist() for part in np.divmod(chosen, logits.shape[1]))
        values = sums.ravel()[chosen]
        self.length += 1
        last = self.length == self.max_new_tokens
        ends = [last or token in self.eos for token in tokens]
        self._finish([i for i in range(self.options.num_beams) if ends[i]], parents, tokens, values)
        running = [i for i, ended in enumerate(ends) if not ended][: self.options.num_beams]
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
        ranked = sorted(self.finished + ended, key=lambda each: -each.score)
        self.finished = ranked[: self.options.num_beams]

    def _enough(self) -> bool:
        """Whether the finished sequences are as many as there can be, and none better is hoped for."""
        options = self.options
        if len(self.finished) < options.num_beams:
            return False
        if options.early_stopping is True or options.num_beams == 1:
            return True
        hoping = options.early_stopping == "never" and options.length_penalty > 0
        length = self.max_new_tokens if hoping else self.length
        return bool(self._sums[0] / self._divisor(length) <= self.finished[-1].score)

    def _divisor(self, length: int) -> float:
        return float(length**self.options.length_penalty)


def run_search(scorer: Scorer, search: BeamSearch) -> tuple[Hypothesis, ...]:
    """Search to the end; the best `num_return_sequences`, best first."""
    search.advance(scorer.first())
    while not search.done:
        search.advance(scorer.next(search.parents, search.tokens))
    return search.best


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Log-probabilities of logits `[..., V]`, in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def _best(values: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Indices of the greatest values, greatest first; of equal ones the lower index."""
    least = np.partition(values, len(values) - count)[len(values) - count]
    enough = np.flatnonzero(values >= least)
    best: NDArray[np.intp] = enough[np.argsort(-values[enough], kind="stable")[:count]]
    return best
