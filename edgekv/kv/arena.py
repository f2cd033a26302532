"""The memory of a group's tensors, as an engine and a cache see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekv.kv.strategies.strategy import Window
from edgekv.spec.geometry import KvDtype, KvTensor

Rows = NDArray[Any]

DTYPES: dict[KvDtype, type[np.integer[Any]]] = {
    "u8": np.uint8,
    "s8": np.int8,
    "s16": np.int16,
    "u16": np.uint16,
}


class Arena(Protocol):
    """Tensors of one type and shape, stored by rows (`RowArena`) or by columns (`ColumnArena`).

    Attributes:
        tensors: the tensors, in order.
        addresses: base address of each.
        bytes_held: bytes allocated, including scratch and alignment.
        bytes_copied: bytes that the cache itself has written so far.
        copies: copies of one range of rows in all tensors so far.
    """

    tensors: tuple[KvTensor, ...]
    addresses: list[int]
    bytes_held: int
    bytes_copied: int
    copies: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""

    def past_shape(self, columns: int) -> list[int]:
        """Shape of the past input of a graph that reads `columns` past rows."""

    def new_shape(self, ar: int) -> list[int]:
        """Shape of a new output of the AR-`ar` graph."""

    def past_offset_bytes(self, window: Window) -> int:
        """Offset of the past from each of `addresses`, in bytes."""

    def new_addresses(self, window: Window) -> list[int]:
        """Base addresses of the new rows."""

    def new_offset_bytes(self, window: Window) -> int:
        """Offset of the new rows from each of `new_addresses`, in bytes."""

    def read(self, tensor: int, rows: Sequence[int]) -> Rows:
        """A copy of these rows of one tensor, `[len(rows), D]`."""

    def write(self, tensor: int, rows: Sequence[int], values: Rows) -> None:
        """Set these rows of one tensor to `[len(rows), D]`."""

    def copy_out(self, tensors: slice, rows: Sequence[int], out: Rows) -> None:
        """Copy these rows of consecutive tensors to `out`, `[tensors, len(rows), D]`."""

    def copy_in(self, tensors: slice, rows: Sequence[int], values: Rows) -> None:
        """Set these rows of consecutive tensors to `[tensors, len(rows), D]`."""

    def row(self, row: int) -> Rows:
        """One row of all tensors, `[N, D]`, sharing memory; one that the graph of the last step could read."""

    def new_row(self, window: Window, at: int) -> Rows:
        """Where a graph writes a new row of an open step in all tensors, `[N, D]`, sharing memory."""

    def compact(self, window: Window, first: int, rows: Sequence[int]) -> None:
        """Copy these new rows of the open step to its new rows `first`, `first` + 1, ..."""


def as_index(rows: Sequence[int]) -> Sequence[int] | slice:
    """Consecutive rows as a slice, which numpy copies in one operation."""
    if rows and list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return rows
