"""How to choose tokens and when to stop: one value for each call of `Model.generate`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from edgekv.errors import BundleError, UsageError, refuse, shown
from edgekv.option import Option
from edgekv.text.grammar import Grammar

if TYPE_CHECKING:
    from edgekv.bundle import GenerationRecord

DEFAULT_MAX_NEW_TOKENS = 128
_MIN_TEMPERATURE = 1e-5
_MAX_BIAS = 1e30
_MAX_PENALTY = 1e6
"""A biased and penalized logit stays within 32-bit floating point."""
_MAX_INT = 2**31 - 1
_MAX_SEED = 2**64 - 1
_SAMPLING_ONLY = ("top_k", "top_p", "min_p", "seed")

EarlyStopping = bool | Literal["never"]


def _read_bias(option: str, text: str) -> tuple[int, float]:
    """A bias as users write it: `15:-2.5`."""
    token, _, value = text.partition(":")
    try:
        return int(token), float(value)
    except ValueError:
        return refuse(option, repr(text[:80]), "ID:BIAS, such as 15:-2.5", "See edgekv tokenize.")


def _read_early_stopping(option: str, text: str) -> EarlyStopping:
    meanings: dict[str, EarlyStopping] = {"true": True, "false": False, "never": "never"}
    if text not in meanings:
        refuse(option, repr(text), "true, false or never", "Leave it out for false.")
    return meanings[text]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token, and when to stop. Valid from construction.

    Values are applied in this order: logit_bias, penalties, min_new_tokens, the caller's logits processors,
    temperature, top_k, top_p, min_p. With a `grammar` the text is complete unless `max_new_tokens`, a stop text or the
    context ends it. `stop_token_ids` end a text as end-of-sequence tokens do, also with `ignore_eos`; neither may come
    before `min_new_tokens`.

    Raises:
        UsageError: a value out of range, or one that has no effect at temperature 0.
    """

    temperature: Annotated[
        float, Option("Divides the logits; 0 is greedy, otherwise at least 0.00001.", shown="the bundle's, or 0")
    ] = 0.0
    top_k: Annotated[int | None, Option("Sample from the k most likely tokens.")] = None
    top_p: Annotated[
        float | None, Option("Of these, sample from the fewest whose probabilities sum to at least p.")
    ] = None
    seed: Annotated[
        int | None,
        Option(
            "Random seed, 64 bits. The same seed, prompt, options and cached tokens give the same text; with "
            "--reproducible, cached tokens do not matter.",
            shown="drawn",
        ),
    ] = None
    min_p: Annotated[
        float,
        Option(
            "Drop tokens whose probability is below this fraction of the most likely token's.",
            shown="the bundle's, or 0",
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Option(
            "Logits of tokens in the prompt or the text are divided by this if positive, multiplied otherwise, as in "
            "Hugging Face transformers and vLLM.",
            shown="the bundle's, or 1",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float, Option("Subtracted from the logit of every generated token, as in OpenAI's API; -2 to 2.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Option("Subtracted once per occurrence of a generated token, as in OpenAI's API; -2 to 2.")
    ] = 0.0
    logit_bias: Annotated[
        Mapping[int, float],
        Option(
            "Added to the logit of a token, up to 1e30 in magnitude; -inf forbids it. Repeat for several.",
            metavar="ID:BIAS",
            parse=_read_bias,
            collect=dict,
        ),
    ] = field(default_factory=dict)
    stop: Annotated[Sequence[str], Option("End before the first of these texts; repeat for several.")] = ()
    max_new_tokens: Annotated[
        int, Option("Maximum number of tokens to generate.", shown="the bundle's, or 128; chat: the context")
    ] = DEFAULT_MAX_NEW_TOKENS
    ignore_eos: Annotated[bool, Option("Do not end at an end-of-sequence token.")] = False
    grammar: Grammar | None = None
    stop_token_ids: Annotated[
        Sequence[int],
        Option("End at this token, which is not part of the text; repeat for several.", "--stop-token-id"),
    ] = ()
    min_new_tokens: Annotated[int, Option("Minimum number of tokens before one may end the text.")] = 0

    def __post_init__(self) -> None:
        temperature = _check_real("temperature", self.temperature)
        if temperature != 0 and not _MIN_TEMPERATURE <= temperature < math.inf:
            expected = f"0, or at least {_MIN_TEMPERATURE:.5f}"
            refuse("temperature", self.temperature, expected, "Use 0 for greedy, about 0.8 for variety.")
        if self.top_k is not None:
            _check_int("top_k", self.top_k, 1, _MAX_INT, "Leave it out to consider all tokens.")
        if self.top_p is not None and not 0 < _check_real("top_p", self.top_p) <= 1:
            refuse("top_p", self.top_p, "above 0, at most 1", "Leave it out to consider all tokens.")
        if not 0 <= _check_real("min_p", self.min_p) <= 1:
            refuse("min_p", self.min_p, "0 to 1", "Leave it out to consider all tokens.")
        if not 1 / _MAX_PENALTY <= _check_real("repetition_penalty", self.repetition_penalty) <= _MAX_PENALTY:
            refuse("repetition_penalty", self.repetition_penalty, "0.000001 to 1,000,000", "Use 1 for none.")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= _check_real(name, getattr(self, name)) <= 2:
                refuse(name, getattr(self, name), "-2 to 2", "Use 0 for none.")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, _MAX_SEED, "Leave it out to draw one.")
        _check_int("max_new_tokens", self.max_new_tokens, 1, _MAX_INT, "Ask for a token or more.")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            refuse("grammar", type(self.grammar).__name__, "a Grammar", "Use Grammar.json_schema(...).")
        expected = f"0 to {self.max_new_tokens}, the most tokens"
        _check_int("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens, "Ask for fewer.", expected)
        if self.min_new_tokens and self.grammar is not None:
            got, fix = f"{self.min_new_tokens} with a grammar", "Leave one of them out."
            refuse("min_new_tokens", got, "nothing: the grammar says where a text may end", fix)
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, _MAX_INT, "Use ids of the bundle's tokenizer.")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        if self.greedy:
            for name in _SAMPLING_ONLY:
                if getattr(self, name) not in (None, 0.0) or (name == "seed" and self.seed is not None):
                    got = f"{getattr(self, name)} at temperature 0, where it changes nothing"
                    refuse(name, got, "a temperature above 0", "Give a temperature such as 0.8, or leave it out.")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen."""
        return self.temperature == 0

    def overlaid(self, **overrides: Any) -> SamplingParams:
        """These values as defaults, overridden by others.

        Values that only apply to sampling are dropped if the result is greedy.

        Raises:
            UsageError: as at construction.
        """
        if overrides.get("temperature", self.temperature) == 0:
            cleared: dict[str, Any] = {"top_k": None, "top_p": None, "min_p": 0.0, "seed": None}
            return replace(self, **{**cleared, **overrides})
        return replace(self, **overrides)

    def described(self) -> str:
        """The values that differ from greedy decoding without penalties, in one line."""
        plain = SamplingParams()
        names = [field.name for field in fields(self) if field.name not in ("stop", "max_new_tokens", "seed")]
        changed = [name for name in names if getattr(self, name) != getattr(plain, name)]
        listed = [f"{name} {shown(getattr(self, name))}" for name in changed]
        return ", ".join(["greedy"] * self.greedy + listed)


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How to search for the most likely sequences. Valid from construction.

    Raises:
        UsageError: a value out of range.
    """

    num_beams: Annotated[
        int, Option("Beam search with this many sequences side by side; their texts are printed at the end.")
    ]
    num_return_sequences: Annotated[int, Option("Number of texts, best first; at most the number of beams.")] = 1
    length_penalty: Annotated[
        float,
        Option(
            "A finished text of n new tokens scores the sum of its log-probabilities divided by n to this power; above "
            "0 favours longer ones."
        ),
    ] = 1.0
    early_stopping: Annotated[
        EarlyStopping,
        Option(
            "true stops at NUM-BEAMS finished texts. false goes on while the best beam, if it ended now, would score "
            "above the worst of them; never scores it at the maximum length if the length penalty is above 0.",
            metavar="true|false|never",
            parse=_read_early_stopping,
            shown="false",
        ),
    ] = False
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS

    def __post_init__(self) -> None:
        _check_int("num_beams", self.num_beams, 1, _MAX_INT, "Use 4, or leave it out.")
        fix = "Ask for fewer, or use more beams."
        expected = f"1 to {self.num_beams}, the number of beams"
        _check_int("num_return_sequences", self.num_return_sequences, 1, self.num_beams, fix, expected)
        if not math.isfinite(_check_real("length_penalty", self.length_penalty)):
            refuse("length_penalty", self.length_penalty, "a finite number", "Use 1.0.")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            refuse("early_stopping", repr(self.early_stopping), "True, False or 'never'", "Leave it out for False.")
        _check_int("max_new_tokens", self.max_new_tokens, 1, _MAX_INT, "Ask for a token or more.")


class SamplingKeywords(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords of `Model.generate`; None means not given."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    stop: str | Sequence[str] | None
    max_new_tokens: int | None
    ignore_eos: bool | None
    grammar: Grammar | None
    stop_token_ids: Sequence[int] | None
    min_new_tokens: int | None


class BeamKeywords(TypedDict, total=False):
    """The fields of `BeamParams` as keywords, but `num_beams`."""

    num_return_sequences: int | None
    length_penalty: float | None
    early_stopping: EarlyStopping | None
    max_new_tokens: int | None


Params = SamplingParams | BeamParams
_OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "num_predict": "max_new_tokens",
    "temp": "temperature",
    "repeat_penalty": "repetition_penalty",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "beams": "num_beams",
}
"""Names that other programs have for a field."""
_SAMPLING_FIELDS, _BEAM_FIELDS = (
    {field.name for field in fields(kind)} - {"max_new_tokens"} for kind in (SamplingParams, BeamParams)
)


def choose_params(
    params: Params | int | None, keywords: Mapping[str, Any], defaults: SamplingParams
) -> tuple[Params, tuple[str, ...]]:
    """Resolve the parameters of a call.

    Args:
        params: used as they are, without the defaults; a number is `max_new_tokens`; None for keywords alone.
        keywords: fields that replace those of `params`, or of `defaults` if there are none. None means not given.
        defaults: the bundle's, for sampling parameters that are not given.

    Raises:
        UsageError: a value out of range, or options of sampling and beam search together.
        TypeError: an unknown keyword.

    Returns:
        The parameters, and the names of those that the bundle has set.
    """
    known = _SAMPLING_FIELDS | _BEAM_FIELDS | {"max_new_tokens"}
    if unknown := keywords.keys() - known:
        name = min(unknown)
        near = _OTHER_NAMES.get(name) or next(iter(get_close_matches(name, known, 1)), None)
        fix = "" if near is None else f". Did you mean {near}?"
        raise TypeError(f"generate: got the keyword {name!r}; expected a field of SamplingParams or BeamParams{fix}")
    chosen_fields = {name: value for name, value in keywords.items() if value is not None}
    if params is not None and not isinstance(params, Params):  # checked as the number of tokens
        chosen_fields, params = {"max_new_tokens": params, **chosen_fields}, None
    if isinstance(params, BeamParams) or (params is None and "num_beams" in chosen_fields):
        fix = "Leave it out: beam search draws nothing, and its text is known at its end alone."
        _refuse_given(chosen_fields, _SAMPLING_FIELDS, "with num_beams", fix)
        kept = {
            name: value for name, value in chosen_fields.items() if name in _BEAM_FIELDS or name == "max_new_tokens"
        }
        return BeamParams(**kept) if params is None else replace(params, **kept), ()
    _refuse_given(chosen_fields, _BEAM_FIELDS, "without num_beams", "Leave it out, or give num_beams too.")
    if params is not None:
        return params.overlaid(**chosen_fields), ()
    chosen, plain = defaults.overlaid(**chosen_fields), SamplingParams()
    names = (field.name for field in fields(SamplingParams) if field.name not in chosen_fields)
    set_by_bundle = tuple(n for n in names if getattr(chosen, n) != getattr(plain, n))
    return chosen, set_by_bundle


def _refuse_given(chosen_fields: Mapping[str, object], names: set[str], condition: str, fix: str) -> None:
    for name, value in chosen_fields.items():
        if name in names and not (value == 0 and name == "temperature") and value not in ((), []):
            refuse(name, f"{shown(value)} {condition}", "nothing", fix)


def default_params(record: GenerationRecord | None, otherwise: SamplingParams | None = None) -> SamplingParams:
    """The bundle's defaults; if it has none, others, or greedy decoding.

    Raises:
        BundleError: a value that sampling refuses.
    """
    if record is None:
        return otherwise or SamplingParams()
    try:
        return SamplingParams(
            record.temperature,
            record.top_k,
            record.top_p,
            min_p=record.min_p,
            repetition_penalty=record.repetition_penalty,
            max_new_tokens=record.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
        )
    except UsageError as error:
        fix = "Export the bundle again from a checkpoint with a correct generation_config.json."
        raise BundleError(
            f"manifest.json: generation: {error.field}", got=error.got, expected=error.expected, fix=fix
        ) from None


def _check_int(name: str, value: object, minimum: int, maximum: int, fix: str, expected: str | None = None) -> None:
    if type(value) is int and minimum <= value <= maximum:  # what follows takes ten times as long
        return
    try:
        right = not isinstance(value, bool) and minimum <= index(value) <= maximum  # type: ignore[arg-type]
    except TypeError:
        right = False
    if not right:
        bounds = (
            f"at least {minimum}, at most {maximum}"
            if maximum < _MAX_SEED
            else f"a whole number from {minimum} on, 64 bits"
        )
        refuse(name, value, expected or bounds, fix)


def _check_real(name: str, value: object) -> float:
    if type(value) is float and not math.isnan(value):
        return value
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
        if abs(number := _check_real("logit_bias", value)) > _MAX_BIAS and number != -math.inf:
            got, expected = f"{value} for token {token}", "at most 1e30 in magnitude, or -inf"
            refuse("logit_bias", got, expected, "Use 100 to force a token.")
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
        if any("\ud800" <= character <= "\udfff" for character in text):
            refuse("stop", "half a surrogate pair", "Unicode text", "Correct the encoding.")
    return texts


CHAT_PARAMS = SamplingParams(0.8, 40, 0.95, min_p=0.05, repetition_penalty=1.05)
"""Of conversations with a checkpoint that says nothing: the defaults of llama.cpp, and a mild penalty, since small
models repeat themselves."""
