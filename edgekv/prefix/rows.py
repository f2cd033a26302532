"""Where the store takes rows from and puts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from edgekv.prefix.groups import Group

Rows = NDArray[Any]


class Source(Protocol):
    """Has the rows of a sequence."""

    def first(self, group: int) -> int:
        """The first token whose rows a group has; it has those of all that follow."""

    def read(self, group: int, token: int, out: Rows) -> None:
        """Copy a group's rows of consecutive tokens, beginning with `token`, to `out`, `[tensors, tokens, D]`."""


class Target(Protocol):
    """Takes the rows of a sequence."""

    def write(self, group: int, token: int, rows: Rows) -> None:
        """Take a group's rows of consecutive tokens, beginning with `token`, `[tensors, tokens, D]`."""


class ArrayRows:
    """One array `[N, tokens, D]` of all tensors; a `Source` and a `Target`."""

    def __init__(self, groups: Sequence[Group], rows: Rows, first: int = 0) -> None:
        """Wrap an array whose first row belongs to the token `first`."""
        self._groups = groups
        self._rows = rows
        self._first = first

    def first(self, group: int) -> int:
        return self._first

    def read(self, group: int, token: int, out: Rows) -> None:
        at, start = 0, token - self._first
        for first, stop in self._groups[group].ranges:
            out[at : at + stop - first] = self._rows[first:stop, start : start + out.shape[1]]
            at += stop - first

    def write(self, group: int, token: int, rows: Rows) -> None:
        at, start = 0, token - self._first
        for first, stop in self._groups[group].ranges:
            self._rows[first:stop, start : start + rows.shape[1]] = rows[at : at + stop - first]
            at += stop - first
