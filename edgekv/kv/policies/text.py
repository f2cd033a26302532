"""Context policies as users write them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from edgekv.errors import UsageError
from edgekv.kv.policies.policy import POLICIES, KeyDiff, Policy, Sinks

POLICY_FORMS = "fail, sliding-window, sinks(N, WINDOW), keydiff(BUDGET) or keydiff(BUDGET, RECENT)"

_FORM = re.compile(r"([a-z-]+)(?:\(([^()]*)\))?")
# More digits than any context, and fewer than Python's limit.
_NUMBER = re.compile(r"\s*[0-9]{1,18}\s*")
_RECENT_DIVISOR = 8


def parse_policy(text: str, inverse_frequencies: Sequence[float]) -> Policy:
    """A context policy as users write it.

    `fail`, `sliding-window`, `sinks(4, 60)` (the first 4 and the newest 60 tokens stay), `keydiff(64)` (64 tokens
    stay, an eighth of them, at least 1, the newest) or `keydiff(64, 16)` (16 of them the newest). Whether the numbers
    fit the graphs is checked when a cache is made.

    Args:
        text: the policy.
        inverse_frequencies: of the model's rotary embedding, R/2 of them, for a policy that moves tokens.

    Raises:
        UsageError: it is none of these.
    """
    form = _FORM.fullmatch(text.strip())
    name, argument = (form[1], form[2]) if form else ("", None)
    if argument is None:
        for known in POLICIES:
            if known.name == name:
                return known
    else:
        match (name, *_numbers(argument)):
            case ("sinks", int(tokens), int(window)):
                return Sinks(tokens, window, tuple(inverse_frequencies))
            case ("keydiff", int(budget)):
                return KeyDiff(budget, max(1, budget // _RECENT_DIVISOR))
            case ("keydiff", int(budget), int(recent)):
                return KeyDiff(budget, recent)
    raise UsageError("context policy", got=repr(text), expected=POLICY_FORMS, fix="Use fail.")


def policy_text(policy: Policy) -> str:
    """A policy as users write it, which `parse_policy` reads."""
    match policy:
        case Sinks(tokens=tokens, window=window):
            return f"sinks({tokens}, {window})"
        case KeyDiff(budget=budget, recent=recent):
            return f"keydiff({budget}, {recent})"
    return policy.name


def _numbers(text: str) -> list[int]:
    """The numbers between commas; an empty list if one of them is not a number."""
    parts = text.split(",")
    return [int(part) for part in parts] if all(_NUMBER.fullmatch(part) for part in parts) else []
