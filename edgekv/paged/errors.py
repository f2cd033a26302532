"""What is wrong with the arguments of the paged path: programming errors, so a kind of `ValueError`."""

from __future__ import annotations


class PagedInputError(ValueError):
    """An argument that was refused before anything was changed.

    Args:
        field: the parameter.
        found: what it held.
        wanted: what would have been accepted.
    """

    def __init__(self, field: str, *, found: object, wanted: object) -> None:
        super().__init__(f"{field}: found {found}; wanted {wanted}")
        self.field = field
        self.found = found
        self.wanted = wanted
