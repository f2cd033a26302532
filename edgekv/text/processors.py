"""Logits processors: they change the logits of a step, given the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import UsageError
from edgekv.text.params import SamplingParams

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


def check_bias(params: SamplingParams, vocab: int) -> None:
    """Raise UsageError for a bias of a token outside of the vocabulary."""
    if wrong := [token for token in params.logit_bias if token >= vocab]:
        wanted, fix = f"0 to {vocab - 1}, the model's vocabulary", "Use ids of the bundle's tokenizer."
        raise UsageError("logit_bias", got=f"id {wrong[0]}", expected=wanted, fix=fix)


def processors_of(params: SamplingParams, vocab: int) -> list[LogitsProcessor]:
    """The processors for some parameters, in the order in which they are applied.

    Raises:
        UsageError: a bias for a token outside of the vocabulary.
    """
    check_bias(params, vocab)
    processors: list[LogitsProcessor] = []
    if params.logit_bias:
        tokens = np.array(list(params.logit_bias), np.intp)
        processors.append(LogitBias(tokens, np.array(list(params.logit_bias.values()), np.float32)))
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        processors.append(Penalties(*penalties))
    return processors
