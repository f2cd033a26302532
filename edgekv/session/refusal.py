"""Refusals of values that a caller gave."""

from __future__ import annotations

from typing import NoReturn

from edgekv.errors import UsageError

_MAX_DIGITS = 40


def shown(value: object) -> str:
    """A value for a message. Python refuses to write integers of more than some thousand digits."""
    if isinstance(value, int) and value.bit_length() > 4 * _MAX_DIGITS:
        return f"a number of {value.bit_length()} bits"
    return str(value)


def refuse(field: str, found: object, wanted: str, fix: str) -> NoReturn:
    """Raise the UsageError of a value."""
    raise UsageError(field, got=shown(found), expected=wanted, fix=fix)
