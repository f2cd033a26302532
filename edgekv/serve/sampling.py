"""Fields of requests that say how to sample, and the parameters that they make."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any, ClassVar

import msgspec

from edgekv.serve.errors import refused
from edgekv.serve.options import Limits
from edgekv.text import SamplingParams

MOST_ANSWERS = 32
MOST_STOPS = 16
MOST_TOP_LOGPROBS = 20
_MOST_TOKENS = 2**31 - 1
_SEEDS = 1 << 64
_CHANGED = ("seed", "stop", "logit_bias", "max_new_tokens")
"""Fields of `SamplingParams` whose values in requests are not as they are there; the others have the same names."""


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests for text have in common. None is as if the field were not there."""

    names: ClassVar[dict[str, str]] = {"lora": "model"}
    """What the request calls fields of the library."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    best_of: int | None = None

    def check(self) -> None:
        """Refuse what is not supported.

        Raises:
            ApiError: naming the field.
        """

    def name_of(self, field: str) -> str | None:
        """The request's name of a field in an error; None if it has no such field.

        Args:
            field: as the library or a chat has it, such as `messages[0].content` or `max_new_tokens`.
        """
        for ours, theirs in self.names.items():
            if field == ours or field.startswith((f"{ours}.", f"{ours}[")):
                field = theirs + field[len(ours) :]
                break
        root = re.split(r"[.\[]", field, maxsplit=1)[0]
        return field if root in self.__struct_fields__ else None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)

    def choices(self, prompts: int, limits: Limits) -> int:
        """Answers to each prompt.

        Args:
            prompts: of the request.
            limits: of the server: what can never run or wait together is refused.

        Raises:
            ApiError: no answer, too many, or a best of more than are wanted.
        """
        n = 1 if self.n is None else self.n
        most = min(MOST_ANSWERS, limits.sessions + limits.queue)
        if prompts > most:
            found, wanted = f"{prompts} prompts", f"at most {most}, which run or wait together"
            raise refused("prompt", got=found, expected=wanted, fix="Send several requests.")
        if not 1 <= n <= most // prompts:
            wanted = f"1 to {most // prompts}" + (f" with {prompts} prompts" if prompts > 1 else "")
            raise refused("n", got=n, expected=wanted, fix="Ask for fewer answers.")
        if self.best_of not in (None, n):
            fix = "Leave it out; every answer is sent."
            raise refused("best_of", got=self.best_of, expected=f"{n}, the value of n", fix=fix)
        return n

    def params(self, defaults: SamplingParams, max_new_tokens: int) -> SamplingParams:
        """The parameters, with the model's defaults for what is not given.

        Fields that have no effect at temperature 0 are left out there, as clients send them with it.

        Raises:
            ApiError: too many stop texts, or a bias for what is no token id.
            UsageError: a value out of range.
        """
        given: dict[str, Any] = {"max_new_tokens": max_new_tokens}
        for name in (each.name for each in fields(SamplingParams) if each.name not in _CHANGED):
            if (value := getattr(self, name, None)) is not None:
                given[name] = value
        if self.seed is not None:
            given["seed"] = self.seed % _SEEDS if self.seed < 0 else self.seed
        if self.stop is not None:
            given["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
            if len(given["stop"]) > MOST_STOPS:
                found, fix = f"{len(given['stop'])} texts", "Give fewer."
                raise refused("stop", got=found, expected=f"at most {MOST_STOPS}", fix=fix)
        if self.logit_bias is not None:
            given["logit_bias"] = {_token(text): bias for text, bias in self.logit_bias.items()}
        if given.get("temperature", defaults.temperature) == 0:
            for name in ("top_p", "top_k", "min_p", "seed"):
                given.pop(name, None)
        return defaults.overlaid(**given)


def check_top_logprobs(name: str, value: int) -> int:
    """The number of most likely tokens to report.

    Raises:
        ApiError: out of range.
    """
    if not 0 <= value <= MOST_TOP_LOGPROBS:
        raise refused(name, got=value, expected=f"0 to {MOST_TOP_LOGPROBS}", fix="Ask for fewer.")
    return value


def check_wanted_tokens(name: str, value: int | None) -> int | None:
    """The most tokens to generate, by the name of the field that asks for them.

    Raises:
        ApiError: out of range.
    """
    if value is not None and not 1 <= value <= _MOST_TOKENS:
        raise refused(name, got=value, expected=f"1 to {_MOST_TOKENS:,}", fix="Ask for a token or more.")
    return value


def _token(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    raise refused("logit_bias", got=repr(text[:40]), expected="token ids", fix="Use ids of the bundle's tokenizer.")
