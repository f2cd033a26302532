"""Lists of numbers, as options give them."""

from __future__ import annotations

from edgekv.errors import UsageError


def parse_numbers(option: str, listed: str) -> tuple[int, ...]:
    """The numbers of an option, such as `--ar 1,32`.

    Raises:
        UsageError: these are no numbers with commas between them.
    """
    try:
        return tuple(int(number) for number in listed.split(","))
    except ValueError:
        wanted = "numbers with commas between them, such as 1,32"
        raise UsageError(option, got=repr(listed), expected=wanted, fix="Check the list.") from None
