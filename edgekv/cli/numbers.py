"""Option values that are not single numbers: lists of numbers, biases of tokens, and devices."""

from __future__ import annotations

import re

from devices import Device, UnknownDeviceError, find
from edgekv.errors import UsageError

_NUMBERS = re.compile(r"\d{1,12}(,\d{1,12})*")
_MOST_NUMBERS = 64


def parse_numbers(option: str, listed: str) -> tuple[int, ...]:
    """The numbers of an option, such as `--ar 1,32`.

    Raises:
        UsageError: not whole numbers of at most 12 digits, separated by commas, or more than 64 of them.
    """
    text = listed.replace(" ", "")
    if _NUMBERS.fullmatch(text) and text.count(",") < _MOST_NUMBERS:
        return tuple(int(number) for number in text.split(","))
    shown = listed if len(listed) <= 40 else f"{listed[:37]}..."
    wanted = f"at most {_MOST_NUMBERS} whole numbers, comma-separated, such as 1,32"
    raise UsageError(option, got=repr(shown), expected=wanted, fix="Correct the list.")


def parse_bias(entries: list[str]) -> dict[int, float]:
    """Biases by token id, as users write them: `15:-2.5`.

    Raises:
        UsageError: the text is not a pair of an id and a number.
    """
    bias = {}
    for entry in entries:
        token, _, value = entry.partition(":")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            wanted = "ID:BIAS, such as 15:-2.5"
            raise UsageError(
                "--logit-bias", got=repr(entry[:80]), expected=wanted, fix="See edgekv tokenize."
            ) from None
    return bias


def find_device(name: str) -> Device:
    """The device of `--device`.

    Raises:
        UsageError: no device has this name; the error suggests names.
    """
    try:
        return find(name)
    except UnknownDeviceError as error:
        raise UsageError("--device", got=repr(error.got), expected=error.wanted, fix=error.fix) from None
