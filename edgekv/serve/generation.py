"""What all requests for text have in common: their fields, and what they ask of the engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import cache, partial
from hashlib import sha256
from typing import Any, ClassVar, TypeVar

import msgspec

from edgekv.engine import Request
from edgekv.serve.errors import ApiError, refused
from edgekv.serve.fields import UnsupportedField, check_fields, within
from edgekv.serve.http import Exchange, read_json
from edgekv.serve.options import Limits
from edgekv.serve.service import Service
from edgekv.text import SamplingParams
from edgekv.text.grammar import Grammar
from edgekv.text.sampler import check_ids

MAX_ANSWERS = 32
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
_MAX_TOKENS = 2**31 - 1
_ALL = (0, -1)
"""What other servers call a `top_k` of all tokens."""
_SEEDS = 1 << 64
_CHANGED = ("seed", "stop", "logit_bias", "max_new_tokens", "grammar", "top_k", "min_new_tokens")
"""Fields of `SamplingParams` that requests have in another form."""
_SAME = tuple(field.name for field in fields(SamplingParams) if field.name not in _CHANGED)
"""The others, which requests call the same."""


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


Schema = dict[str, Any] | bool
"""A JSON schema."""


class SchemaFormat(msgspec.Struct, frozen=True):
    """A named JSON schema."""

    name: str | None = None
    schema: Schema | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """`response_format`; llama.cpp and SGLang have a schema of its own too."""

    type: str
    json_schema: SchemaFormat | None = None
    schema: Schema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`structured_outputs` of vLLM; white space is never free here."""

    json: Schema | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests for text have in common. None is as if the field were not there."""

    path: ClassVar[str]
    names: ClassVar[dict[str, str]] = {"lora": "model", "min_new_tokens": "min_tokens"}
    """What the request calls fields of the library."""
    unsupported: ClassVar[dict[str, UnsupportedField]] = {}
    """Fields of other servers that are refused here, and those that are neutral here alone."""

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
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: Schema | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None

    def check(self) -> None:
        """Refuse what is not supported.

        Raises:
            ApiError: naming the field.
        """
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            field, fix = "stream_options.continuous_usage_stats", "Use include_usage; the last event has the usage."
            raise refused(field, got="true", expected="false", fix=fix)

    def asked_format(self) -> tuple[str, ResponseFormat] | None:
        """The form that the field for it asks for, with the name of that field; None if there is none."""
        return None

    def read_grammar(self) -> Grammar | None:
        """What the text has to be; None for free text.

        Raises:
            ApiError: as `constraint`.
            UsageError: a schema that is wrong or too large.
        """
        constraint = self.constraint()
        return None if constraint is None else constraint[1]()

    def constraint(self) -> tuple[str, Callable[[], Grammar]] | None:
        """What makes the grammar that a request asks for, and the field that does; None if the text is free.

        Raises:
            ApiError: two fields do, or an unknown form.
        """
        constraints = dict[str, Callable[[], Grammar]]()
        if (outputs := self.structured_outputs) is not None:
            for kind, make in _MAKERS.items():
                if (value := getattr(outputs, kind)) not in _FREE:
                    constraints[f"structured_outputs.{kind}"] = partial(make, value)
            if outputs.json_object:
                constraints["structured_outputs.json_object"] = Grammar.json_object
        for name, kind in _CONSTRAINTS.items():
            if (value := getattr(self, name)) not in _FREE:
                constraints[name] = partial(_MAKERS[kind], value)
        if (asked := self.asked_format()) is not None and (made := _made_by_format(*asked)) is not None:
            constraints[made[0]] = made[1]
        if len(constraints) > 1:
            first, second, *_ = constraints
            raise refused(second, got=f"a constraint beside {first}", expected="one of them", fix="Leave one out.")
        return next(iter(constraints.items()), None)

    def name_of(self, field: str) -> str | None:
        """The request's name of a field in an error; None if it has no such field.

        Args:
            field: as the library or a chat has it, such as `messages[0].content` or `max_new_tokens`.
        """
        if field in _OF_GRAMMARS:
            with suppress(ApiError):  # which is the one to name
                if (asked := self.constraint()) is not None:
                    return asked[0]
        for ours, theirs in self.names.items():
            if field == ours or field.startswith((f"{ours}.", f"{ours}[")):
                field = theirs + field[len(ours) :]
                break
        return within(field, self.__struct_fields__)

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
        max_answers = min(MAX_ANSWERS, limits.sessions + limits.queue)
        if prompts > max_answers:
            got, expected = f"{prompts} prompts", f"at most {max_answers}, which run or wait together"
            raise refused("prompt", got=got, expected=expected, fix="Send several requests.")
        if not 1 <= n <= max_answers // prompts:
            expected = f"1 to {max_answers // prompts}" + (f" with {prompts} prompts" if prompts > 1 else "")
            raise refused("n", got=n, expected=expected, fix="Ask for fewer answers.")
        if self.best_of not in (None, n):
            fix = "Leave it out; every answer is sent."
            raise refused("best_of", got=self.best_of, expected=f"{n}, the value of n", fix=fix)
        return n

    def params(
        self, defaults: SamplingParams, vocab: int, max_new_tokens: int, grammar: Grammar | None
    ) -> SamplingParams:
        """The parameters, with the model's defaults for what is not given.

        Fields that have no effect at temperature 0 are left out there, as clients send them with it.

        Args:
            defaults: of the model.
            vocab: number of its tokens.
            max_new_tokens: the most tokens of an answer.
            grammar: what the text has to be; None for free text.

        Raises:
            ApiError: too many stop texts, or a bias for what is no token id.
            UsageError: a value out of range, or a token outside of the vocabulary: the headers of a stream do not wait
                for the engine.
        """
        params: dict[str, Any] = {"max_new_tokens": max_new_tokens, "grammar": grammar}
        for name in _SAME:
            if (value := getattr(self, name)) is not None:
                params[name] = value
        if self.top_k is not None:
            params["top_k"] = None if self.top_k in _ALL else self.top_k
        if self.min_tokens is not None:
            params["min_new_tokens"] = self.min_tokens
        if self.seed is not None:
            params["seed"] = self.seed % _SEEDS if self.seed < 0 else self.seed
        if self.stop is not None:
            params["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
            if len(params["stop"]) > MAX_STOPS:
                got, fix = f"{len(params['stop'])} texts", "Give fewer."
                raise refused("stop", got=got, expected=f"at most {MAX_STOPS}", fix=fix)
        if self.logit_bias is not None:
            params["logit_bias"] = {_token(text): bias for text, bias in self.logit_bias.items()}
        if params.get("temperature", defaults.temperature) == 0:
            for name in ("top_p", "top_k", "min_p", "seed"):
                params.pop(name, None)
        made = defaults.overlaid(**params)
        if made.logit_bias or made.stop_token_ids:
            check_ids(made, vocab)
        return made


def check_top_logprobs(name: str, value: int) -> int:
    """The number of most likely tokens to report.

    Raises:
        ApiError: out of range.
    """
    if not 0 <= value <= MAX_TOP_LOGPROBS:
        raise refused(name, got=value, expected=f"0 to {MAX_TOP_LOGPROBS}", fix="Ask for fewer.")
    return value


def check_max_tokens(name: str, value: int | None) -> int | None:
    """The most tokens to generate, by the name of the field that asks for them.

    Raises:
        ApiError: out of range.
    """
    if value is not None and not 1 <= value <= _MAX_TOKENS:
        raise refused(name, got=value, expected=f"1 to {_MAX_TOKENS:,}", fix="Ask for a token or more.")
    return value


def _token(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    raise refused("logit_bias", got=repr(text[:40]), expected="token ids", fix="Use ids of the bundle's tokenizer.")


R = TypeVar("R", bound=SamplingFields)


@cache
def _elsewhere(kind: type[SamplingFields]) -> dict[str, str]:
    """The paths that read the fields that requests of a kind do not have, by the field."""
    paths = dict[str, str]()
    for other in SamplingFields.__subclasses__():
        for name in other.__struct_fields__:
            if name not in kind.__struct_fields__:
                paths.setdefault(name, other.path)
    return paths


def _made_by_format(field: str, asked: ResponseFormat) -> tuple[str, Callable[[], Grammar]] | None:
    """What a form asks for, and its own field in errors; None for free text.

    Raises:
        ApiError: an unknown form, or one without its schema.
    """
    if asked.type == "text":
        return None
    if asked.type not in _FORMS:
        got, fix = repr(asked.type)[:40], "Leave it out for text."
        raise refused(f"{field}.type", got=got, expected=" or ".join(_FORMS), fix=fix)
    named = None if asked.json_schema is None else asked.json_schema.schema
    if (schema := asked.schema if named is None else named) is None:
        if asked.type == "json_schema":
            wrong = f"{field}.json_schema" if field == "response_format" else f"{field}.schema"
            raise refused(wrong, got="no schema", expected="one", fix="Add schema.")
        return field, Grammar.json_object
    own = f"{field}.schema" if named is None else f"{field}.json_schema.schema"
    return own, partial(Grammar.json_schema, schema)


_FREE: tuple[Any, ...] = (None, "", [])
"""Values of a constraint that leave a text free; an empty schema, {}, is any JSON."""
_CONSTRAINTS = {
    "guided_json": "json",
    "json_schema": "json",
    "guided_regex": "regex",
    "regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "ebnf": "grammar",
    "grammar": "grammar",
}
"""Fields that bind the text, by the kind of `_MAKERS`."""
_OF_GRAMMARS = ("json_schema", "regex", "choice", "grammar")
"""Fields of the errors of `Grammar`."""
_FORMS = ("text", "json_object", "json_schema")
_MAKERS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.gbnf,
}


def accept(service: Service, exchange: Exchange, body: bytes, kind: type[R]) -> tuple[R, str | None]:
    """A request for text, and the adapters that it asks for.

    Raises:
        ApiError: it is malformed, asks for another model, or for what is not supported.
        AdapterError: an adapter is damaged.
    """
    request = read_json(body, kind)
    check_fields(body, request.__struct_fields__, _elsewhere(kind), request.unsupported)
    lora = service.check_name(request.model)
    request.check()
    if request.cache_salt is not None:
        both = msgspec.json.encode([exchange.salt, request.cache_salt])
        exchange.cache_salt = sha256(both).hexdigest()
    exchange.name_of = request.name_of
    return request, lora


def for_answers(request: Request, n: int) -> list[Request]:
    """A request for each of several answers to a prompt."""
    return [request, *(request.for_answer(number) for number in range(1, n))]


async def compile_grammar(service: Service, exchange: Exchange, request: Request) -> None:
    """Compile what binds the answer, unless it has been; the engine would wait for it.

    Raises:
        ApiError: as `WorkQueue.run`.
        UsageError: a grammar that is wrong or too complex.
    """
    assert request.params is None or isinstance(request.params, SamplingParams)
    grammar = None if request.params is None else request.params.grammar
    await service.work.run(exchange, "grammar", lambda: service.texts.bind(grammar, request.tools, request.salt))
