"""What is wrong with the arguments of the paged path: programming errors, so a kind of `ValueError`."""

from __future__ import annotations


class PagedInputError(ValueError):
    """An argument that was refused before anything was changed.

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
