"""The keywords of `Model.generate`, and the parameters that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

from edgekv.errors import refuse, shown
from edgekv.text.params import BeamKeywords, BeamParams, SamplingKeywords, SamplingParams

if TYPE_CHECKING:
    from edgekv.engine.speculate import Speculate, SpeculateMode
    from edgekv.engine.speculation import Speculation
    from edgekv.prefix import RetentionPolicy
    from edgekv.text.processors import LogitsProcessor


class Call(TypedDict, total=False):
    """Keywords of `Model.generate` for all kinds of calls."""

    cache_salt: str | None
    lora: str | None
    retention: RetentionPolicy | None


class SamplingCall(SamplingKeywords, Call, total=False):
    """Keywords of `Model.generate` for sampling."""

    sequence: int | None
    processors: Sequence[LogitsProcessor]
    return_logits: bool
    speculate: Speculate | SpeculateMode | Speculation | None


class BeamCall(BeamKeywords, Call, total=False):
    """Keywords of `Model.generate` for beam search, except `num_beams`."""


Params = SamplingParams | BeamParams
_BEAM_ONLY = tuple(each.name for each in fields(BeamParams) if each.name != "max_new_tokens")


@dataclass(frozen=True, slots=True)
class ChosenParams:
    """The resolved parameters of a call.

    Attributes:
        params: valid parameters.
        bundle_defaults: names of the parameters taken from the bundle.
    """

    params: Params
    bundle_defaults: tuple[str, ...] = ()


def choose_params(params: Params | int | None, keywords: Mapping[str, Any], defaults: SamplingParams) -> ChosenParams:
    """Resolve the parameters of a call.

    Args:
        params: used as they are, without the defaults; a number is `max_new_tokens`; None for keywords alone.
        keywords: fields that replace those of `params`, or of `defaults` if there are none. None means not given.
        defaults: the bundle's, for sampling parameters that are not given.

    Raises:
        UsageError: a value out of range, or options of sampling and beam search together.
    """
    given = {name: value for name, value in keywords.items() if value is not None}
    if params is not None and not isinstance(params, Params):  # checked as the number of tokens
        given, params = {"max_new_tokens": params, **given}, None
    if isinstance(params, BeamParams) or (params is None and "num_beams" in given):
        fix = "Leave it out: beam search draws nothing, and its text is known at its end alone."
        _refuse_given(given, SamplingKeywords.__annotations__.keys() - {"max_new_tokens"}, "with num_beams", fix)
        kept = {name: value for name, value in given.items() if name in _BEAM_ONLY or name == "max_new_tokens"}
        return ChosenParams(BeamParams(**kept) if params is None else replace(params, **kept))
    _refuse_given(given, set(_BEAM_ONLY), "without num_beams", "Leave it out, or give num_beams too.")
    if params is not None:
        return ChosenParams(params.overlaid(**given))
    chosen, plain = defaults.overlaid(**given), SamplingParams()
    names = (each.name for each in fields(SamplingParams) if each.name not in given)
    set_by_bundle = tuple(n for n in names if getattr(chosen, n) != getattr(plain, n))
    return ChosenParams(chosen, set_by_bundle)


def _refuse_given(given: Mapping[str, object], names: set[str], condition: str, fix: str) -> None:
    for name, value in given.items():
        if name in names and not (value == 0 and name == "temperature") and value not in ((), []):
            refuse(name, f"{shown(value)} {condition}", "nothing", fix)
