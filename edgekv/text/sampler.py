"""Choosing the next token: processors that change its logits, and the choice."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import UsageError
from edgekv.text.params import SamplingParams
from quant import Encoding

Logits = NDArray[np.float32]


class LogitsProcessor(Protocol):
    """Changes the logits of one step. Any function of this signature is one."""

    def __call__(self, prompt: Sequence[int], generated: Sequence[int], logits: Logits) -> NDArray[Any]:
        """The logits to choose from.

        Args:
            prompt: token ids of the prompt.
            generated: token ids generated so far, oldest first.
            logits: float logits `[V]` of the step, a copy that may be changed in place.

        Returns:
            Logits `[V]`; the same array or another. -inf forbids a token.
        """


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Adds to the logits of some tokens.

    Attributes:
        tokens: ids `[K]`.
        bias: what is added `[K]`.
    """

    tokens: NDArray[np.intp]
    bias: Logits

    def __call__(self, prompt: Sequence[int], generated: Sequence[int], logits: Logits) -> Logits:
        logits[self.tokens] += self.bias
        return logits


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties for tokens that occurred before; see `SamplingParams`.

    The repetition penalty considers prompt and text, as `RepetitionPenaltyLogitsProcessor` of Hugging Face
    transformers and vLLM do; presence and frequency consider only the text, as vLLM and OpenAI's API do.
    """

    repetition: float
    presence: float
    frequency: float

    def __call__(self, prompt: Sequence[int], generated: Sequence[int], logits: Logits) -> Logits:
        if self.repetition != 1:
            seen = np.unique(np.array((*prompt, *generated), np.intp))
            values = logits[seen]
            penalty = np.float32(self.repetition)
            logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        if generated and (self.presence or self.frequency):
            tokens, counts = np.unique(np.array(generated, np.intp), return_counts=True)
            logits[tokens] -= np.float32(self.frequency) * counts + np.float32(self.presence)
        return logits


@dataclass(frozen=True, slots=True)
class LeastTokens:
    """Keeps a text from ending before it has so many tokens.

    Attributes:
        count: of generated tokens.
        ends: ids that would end it.
    """

    count: int
    ends: NDArray[np.intp]

    def __call__(self, prompt: Sequence[int], generated: Sequence[int], logits: Logits) -> Logits:
        if len(generated) < self.count:
            logits[self.ends] = -np.inf
        return logits


def check_ids(params: SamplingParams, vocab: int) -> None:
    """Raise UsageError for a bias, or an end, of a token outside of the vocabulary."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if wrong := [token for token in ids if token >= vocab]:
            expected, fix = f"0 to {vocab - 1}, the model's vocabulary", "Use ids of the bundle's tokenizer."
            raise UsageError(name, got=f"id {wrong[0]}", expected=expected, fix=fix)


def processors_of(params: SamplingParams, vocab: int, eos: Collection[int] = ()) -> list[LogitsProcessor]:
    """The processors for some parameters, in the order in which they are applied.

    Args:
        params: sampling parameters.
        vocab: number of logits.
        eos: end-of-sequence tokens.

    Raises:
        UsageError: a bias for a token outside of the vocabulary.
    """
    check_ids(params, vocab)
    processors: list[LogitsProcessor] = []
    if params.logit_bias:
        tokens = np.array(list(params.logit_bias), np.intp)
        processors.append(LogitBias(tokens, np.array(list(params.logit_bias.values()), np.float32)))
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        processors.append(Penalties(*penalties))
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    if params.min_new_tokens and ends:
        processors.append(LeastTokens(params.min_new_tokens, np.array(sorted(ends), np.intp)))
    return processors


class Sampler:
    """Chooses tokens one at a time.

    The random number of a token depends only on the seed and the token's position, so a text resumed at any point
    continues in the same way.

    Attributes:
        seed: the random seed, drawn if none was given; None if greedy.
    """

    def __init__(self, params: SamplingParams, encoding: Encoding, processors: Sequence[LogitsProcessor] = ()) -> None:
        """Prepare for logits that are integers of an encoding.

        Args:
            params: sampling parameters; bias and penalties are not applied here, see `of`.
            encoding: of the logits.
            processors: applied to the logits, in this order.
        """
        self._params = params
        self._is_greedy = params.greedy
        self._encoding = encoding
        self._processors = tuple(processors)
        self.seed: int | None = None
        if not self._is_greedy:
            self.seed = secrets.randbits(32) if params.seed is None else params.seed

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        encoding: Encoding,
        vocab: int,
        processors: Sequence[LogitsProcessor] = (),
        eos: Collection[int] = (),
    ) -> Sampler:
        """A sampler with the bias and penalties of the parameters, then the caller's processors.

        Args:
            params: sampling parameters.
            encoding: of the logits.
            vocab: number of logits.
            processors: of the caller.
            eos: end-of-sequence tokens.

        Raises:
            UsageError: a bias for a token outside of the vocabulary.
        """
        return cls(params, encoding, (*processors_of(params, vocab, eos), *processors))

    def __call__(
        self,
        logits: NDArray[Any],
        prompt: Sequence[int] = (),
        generated: Sequence[int] = (),
        allowed: NDArray[np.intp] | None = None,
    ) -> int:
        """The next token.

        Greedy decoding without processors compares integers; ties go to the lowest id.

        Args:
            logits: integers `[V]`.
            prompt: token ids of the prompt.
            generated: token ids generated so far.
            allowed: ids of the tokens to choose from, ascending; None for all.

        Raises:
            UsageError: a processor gave logits of another shape, NaN, or none that is finite.
        """
        values = self._process(logits, prompt, generated) if self._processors else logits
        if allowed is None:
            return self._choose(values, len(prompt) + len(generated))
        values = values[allowed]
        if self._processors and not np.isfinite(values.max()):
            got, expected = "none that is finite among those that the grammar allows", "one at least"
            raise UsageError("logits", got=got, expected=expected, fix="Correct the bias or the logits processor.")
        return int(allowed[self._choose(values, len(prompt) + len(generated))])

    def _choose(self, values: NDArray[Any], position: int) -> int:
        """Index of the chosen token; integers have the order of the logits."""
        if self._is_greedy:
            return int(values.argmax())
        order, probabilities = self._distribution(values, values) if self._processors else self.distribution(values)
        cumulative = probabilities.cumsum()
        drawn = self._uniform(position) * cumulative[-1]
        last = cumulative.searchsorted(cumulative[-1])  # later ones have a probability of 0
        return int(order[min(cumulative.searchsorted(drawn, "right"), last)])

    def real(self, logits: NDArray[Any]) -> NDArray[np.float32]:
        """Dequantized logits, before any processor."""
        return self._encoding.dequantize(logits)

    def distribution(self, logits: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The tokens that may be chosen, most likely first, and their probabilities, which sum to 1.

        Args:
            logits: integers `[V]`, to which no processor is applied.
        """
        return self._distribution(logits.astype(np.int64), logits)

    def _distribution(self, ranks: NDArray[Any], logits: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        params = self._params
        kept = len(ranks) if params.top_k is None else min(params.top_k, len(ranks))
        order = most_likely(ranks, kept)
        chosen = logits[order]
        real = (chosen if ranks is logits else self._encoding.dequantize(chosen)).astype(np.float64)
        weights = np.exp((real - real[0]) / params.temperature)
        probabilities = weights / weights.sum()
        if params.top_p is not None:
            before = probabilities.cumsum() - probabilities
            kept = int(np.count_nonzero(before < params.top_p))
            order, probabilities = order[:kept], probabilities[:kept] / probabilities[:kept].sum()
        if params.min_p:
            kept = int(np.count_nonzero(probabilities >= params.min_p * probabilities[0]))
            order, probabilities = order[:kept], probabilities[:kept] / probabilities[:kept].sum()
        return order, probabilities

    def _process(self, logits: NDArray[Any], prompt: Sequence[int], generated: Sequence[int]) -> NDArray[Any]:
        values: NDArray[Any] = self.real(logits)
        for processor in self._processors:
            values = np.asarray(processor(prompt, generated, values))
            if values.shape != logits.shape or np.isnan(values).any() or not np.isfinite(values.max()):
                got = f"{list(values.shape)}, {np.isfinite(values).sum()} of them finite, from {processor}"
                expected = f"{list(logits.shape)} without NaN, one of them finite at least"
                raise UsageError("logits", got=got, expected=expected, fix="Correct the logits processor.")
        return values

    def _uniform(self, position: int) -> float:
        """A number in [0, 1) determined by the seed and a position, the same on every platform and in every release."""
        assert self.seed is not None
        raw = int(np.random.Philox(key=self.seed, counter=position).random_raw())
        return (raw >> 11) * 2.0**-53


def most_likely(values: NDArray[Any], count: int) -> NDArray[np.intp]:
    """Indices of the largest values in descending order; ties go to the lower index."""
    if count == len(values):
        return np.argsort(-values, kind="stable")
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    enough = np.flatnonzero(values >= threshold)
    best: NDArray[np.intp] = enough[np.argsort(-values[enough], kind="stable")[:count]]
    return best
