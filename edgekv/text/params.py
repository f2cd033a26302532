"""How to choose tokens and when to stop: one value for each call of `Model.generate`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from operator import index
from typing import Any, Literal, TypedDict, Unpack

from edgekv.errors import refuse, shown
from edgekv.text.grammar import Grammar

DEFAULT_MAX_NEW_TOKENS = 128
_MIN_TEMPERATURE = 1e-5
_MOST_BIAS = 1e30
_MOST_PENALTY = 1e6
"""A biased and penalized logit stays within 32-bit floating point."""
_MAX_INT = 2**31 - 1
_MAX_SEED = 2**64 - 1
_SAMPLING_ONLY = ("top_k", "top_p", "min_p", "seed")

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token, and when to stop. Valid from construction.

    Values are applied in this order: logit_bias, penalties, the caller's logits processors, temperature, top_k,
    top_p, min_p.

    Attributes:
        temperature: divides the logits; 0 is greedy, otherwise at least 0.00001.
        top_k: sample from the k most likely tokens; None for all.
        top_p: of these, sample from the smallest set whose probabilities sum to at least p; None for all.
        min_p: of these, drop tokens less likely than min_p times the most likely one; 0 drops none.
        repetition_penalty: logits of tokens in the prompt or the text are divided by it if positive, multiplied by it
            otherwise (as in Hugging Face transformers and vLLM); 0.000001 to 1,000,000; 1 for none.
        presence_penalty: subtracted from the logit of every token generated so far (as in OpenAI's API and vLLM),
            -2 to 2.
        frequency_penalty: subtracted once per occurrence in the generated text (likewise), -2 to 2.
        logit_bias: added to the logits of these token ids, up to 1e30 in magnitude; -inf forbids a token.
        seed: random seed, 64 bits; None draws one. The same seed, prompt and parameters give the same tokens.
        stop: the generation ends before the first of these texts.
        max_new_tokens: maximum number of tokens to generate.
        ignore_eos: do not end at an end-of-sequence token.
        grammar: what the whole text has to be; it is then complete unless `max_new_tokens`, a stop text or the
            context ends it earlier.

    Raises:
        UsageError: a value out of range, or one that has no effect at temperature 0.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    ignore_eos: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        temperature = _check_real("temperature", self.temperature)
        if temperature != 0 and not _MIN_TEMPERATURE <= temperature < math.inf:
            wanted = f"0, or at least {_MIN_TEMPERATURE:.5f}"
            refuse("temperature", self.temperature, wanted, "Use 0 for greedy, about 0.8 for variety.")
        if self.top_k is not None:
            _check_int("top_k", self.top_k, 1, _MAX_INT, "Leave it out to consider all tokens.")
        if self.top_p is not None and not 0 < _check_real("top_p", self.top_p) <= 1:
            refuse("top_p", self.top_p, "above 0, at most 1", "Leave it out to consider all tokens.")
        if not 0 <= _check_real("min_p", self.min_p) <= 1:
            refuse("min_p", self.min_p, "0 to 1", "Leave it out to consider all tokens.")
        if not 1 / _MOST_PENALTY <= _check_real("repetition_penalty", self.repetition_penalty) <= _MOST_PENALTY:
            refuse("repetition_penalty", self.repetition_penalty, "0.000001 to 1,000,000", "Use 1 for none.")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= _check_real(name, getattr(self, name)) <= 2:
                refuse(name, getattr(self, name), "-2 to 2", "Use 0 for none.")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, _MAX_SEED, "Leave it out to draw one.")
        _check_int("max_new_tokens", self.max_new_tokens, 1, _MAX_INT, "Ask for a token or more.")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            refuse("grammar", type(self.grammar).__name__, "a Grammar", "Use Grammar.json_schema(...).")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        if self.greedy:
            for name in _SAMPLING_ONLY:
                if getattr(self, name) not in (None, 0.0) or (name == "seed" and self.seed is not None):
                    found = f"{getattr(self, name)} at temperature 0, where it changes nothing"
                    refuse(name, found, "a temperature above 0", "Give a temperature such as 0.8, or leave it out.")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen."""
        return self.temperature == 0

    def overlaid(self, **given: Unpack[SamplingKeywords]) -> SamplingParams:
        """These values as defaults, overridden by others.

        Values that only apply to sampling are dropped if the result is greedy.

        Raises:
            UsageError: as at construction.
        """
        if given.get("temperature", self.temperature) == 0:
            cleared: dict[str, Any] = {"top_k": None, "top_p": None, "min_p": 0.0, "seed": None}
            return replace(self, **{**cleared, **given})
        return replace(self, **given)

    def described(self) -> str:
        """The values that differ from greedy decoding without penalties, in one line."""
        plain = SamplingParams()
        names = [each.name for each in fields(self) if each.name not in ("stop", "max_new_tokens", "seed")]
        changed = [name for name in names if getattr(self, name) != getattr(plain, name)]
        listed = [f"{name} {shown(getattr(self, name))}" for name in changed]
        return ", ".join(["greedy"] * self.greedy + listed)


class SamplingKeywords(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords; omitted ones have their defaults."""

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int | None
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    stop: Sequence[str]
    max_new_tokens: int
    ignore_eos: bool
    grammar: Grammar | None


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How to search for the most likely sequences. Valid from construction.

    Attributes:
        num_beams: sequences that are extended in parallel. One is greedy decoding.
        num_return_sequences: finished sequences to return, at most `num_beams`.
        length_penalty: a finished sequence of n new tokens scores the sum of its log-probabilities divided by
            n**length_penalty; above 0 favours longer ones.
        early_stopping: True stops at `num_beams` finished sequences. False continues while the best beam, if it
            ended now, would score above the worst of them; "never" scores it at the maximum length with its
            current sum if `length_penalty` is above 0.
        max_new_tokens: maximum number of tokens to generate.

    Raises:
        UsageError: a value out of range.
    """

    num_beams: int
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS

    def __post_init__(self) -> None:
        _check_int("num_beams", self.num_beams, 1, _MAX_INT, "Use 4, or leave it out.")
        fix = "Ask for fewer, or use more beams."
        wanted = f"1 to {self.num_beams}, the number of beams"
        _check_int("num_return_sequences", self.num_return_sequences, 1, self.num_beams, fix, wanted)
        if not math.isfinite(_check_real("length_penalty", self.length_penalty)):
            refuse("length_penalty", self.length_penalty, "a finite number", "Use 1.0.")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            refuse("early_stopping", repr(self.early_stopping), "True, False or 'never'", "Leave it out for False.")
        _check_int("max_new_tokens", self.max_new_tokens, 1, _MAX_INT, "Ask for a token or more.")


class BeamKeywords(TypedDict, total=False):
    """The fields of `BeamParams` as keywords, except `num_beams`."""

    num_return_sequences: int | None
    length_penalty: float | None
    early_stopping: EarlyStopping | None
    max_new_tokens: int


def _check_int(name: str, value: object, least: int, most: int, fix: str, wanted: str | None = None) -> None:
    try:
        right = not isinstance(value, bool) and least <= index(value) <= most  # type: ignore[arg-type]
    except TypeError:
        right = False
    if not right:
        bounds = f"at least {least}, at most {most}" if most < _MAX_SEED else f"a whole number from {least} on, 64 bits"
        refuse(name, value, wanted or bounds, fix)


def _check_real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        refuse(name, repr(value), "a number", "Give a number.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isnan(number):
        refuse(name, value, "a number", "Give a number.")
    return number


def _checked_bias(bias: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        refuse("logit_bias", shown(bias), "numbers by token id", "Give a dict.")
    checked = {}
    for token, value in dict(bias).items():
        _check_int("logit_bias", token, 0, _MAX_INT, "Use ids of the bundle's tokenizer.")
        if abs(number := _check_real("logit_bias", value)) > _MOST_BIAS and number != -math.inf:
            found, wanted = f"{value} for token {token}", "at most 1e30 in magnitude, or -inf"
            refuse("logit_bias", found, wanted, "Use 100 to force a token.")
        checked[index(token)] = float(value)
    return checked


def _checked_stop(stop: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(stop, Iterable):
        refuse("stop", shown(stop), "texts", "Give a list of texts.")
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in texts:
        if not isinstance(text, str):
            refuse("stop", repr(text), "texts", "Give a list of texts.")
        if not text:
            refuse("stop", "an empty text", "one character or more", "Leave it out.")
    return texts
