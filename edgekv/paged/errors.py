"""Errors in the arguments of paged attention: programming errors, so a `ValueError`."""

from __future__ import annotations


class PagedInputError(ValueError):
    """An invalid argument, found before anything was changed.

    Args:
        field: the parameter.
        got: the value found.
        expected: what is accepted.
    """

    def __init__(self, field: str, *, got: object, expected: object) -> None:
        super().__init__(f"{field}: got {got}; expected {expected}")
        self.field = field
        self.got = got
        self.expected = expected
