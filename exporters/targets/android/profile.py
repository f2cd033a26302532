"""The profile that Genie writes: https://docs.qualcomm.com/doc/80-63442-100/topic/profile_profile.html"""

from __future__ import annotations

from typing import Any

import msgspec

from edgekv.errors import EngineError


class GenieSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What Genie measured in a query.

    Attributes:
        load_ms: time to create the dialog, ms.
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens of the answer.
        first_token_ms: time to the first token, ms.
        prompt_tokens_per_s: speed of prefill.
        new_tokens_per_s: speed of decode.
    """

    load_ms: float
    prompt_tokens: int
    new_tokens: int
    first_token_ms: float
    prompt_tokens_per_s: float
    new_tokens_per_s: float


class _Component(msgspec.Struct, frozen=True):
    events: list[dict[str, Any]] = []


class _Profile(msgspec.Struct, frozen=True):
    components: list[_Component]


_IN_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "ns": 1e-6}


def read_profile(content: bytes) -> GenieSpeed:
    """The last query of a profile.

    Raises:
        EngineError: it is no profile of Genie, or has no query.
    """
    fix = "Check the version of Genie on the phone."
    try:
        profile = msgspec.json.decode(content, type=_Profile)
        events = {event["type"]: event for component in profile.components for event in component.events}
        created, query = events["GenieDialog_create"], events["GenieDialog_query"]
        return GenieSpeed(
            load_ms=_ms(created["init-time"]),
            prompt_tokens=int(query["num-prompt-tokens"]["value"]),
            new_tokens=int(query["num-generated-tokens"]["value"]),
            first_token_ms=_ms(query["time-to-first-token"]),
            prompt_tokens_per_s=float(query["prompt-processing-rate"]["value"]),
            new_tokens_per_s=float(query["token-generation-rate"]["value"]),
        )
    except msgspec.MsgspecError as error:
        raise EngineError("Genie's profile", got=str(error), expected="its JSON", fix=fix) from None
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError("Genie's profile", got=f"no {error}", expected="a query", fix=fix) from None


def _ms(metric: dict[str, Any]) -> float:
    return float(metric["value"]) * _IN_MS[metric["unit"]]
