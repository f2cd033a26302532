"""The bytes of a cache: one aligned allocation for all heads, and the copies within it."""

from __future__ import annotations

from ctypes import memmove
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.kv.geometry import KvDtype
from edgekv.kv.layout import ALIGNMENT_BYTES, Layout
from edgekv.kv.move import Move, Place

Rows = NDArray[Any]

_DTYPES: dict[KvDtype, type[np.uint8] | type[np.int16]] = {"u8": np.uint8, "s16": np.int16}


class Arena:
    """Memory for a layout, filled with the zero point. The tensors' order is that of `Geometry.names()`.

    Attributes:
        layout: sizes and offsets in bytes.
        array: all tensors, `[N, rows, D]`; the rows of one tensor are contiguous.
        scratch: where new rows land that are copied later, `[N, scratch_rows, D]`.
        addresses: base address of each tensor, a multiple of 64; row r lies `r * row_bytes` behind it.
        scratch_addresses: base address of each scratch tensor, likewise; empty without scratch rows.
        row_bytes: bytes of one row.
        bytes_copied: bytes that `execute` has written so far.
        copies: moves that it has executed so far.
    """

    def __init__(self, layout: Layout) -> None:
        geometry = layout.geometry
        memory = np.empty(layout.allocated_bytes, np.uint8)
        offset = -memory.ctypes.data % ALIGNMENT_BYTES
        dtype = _DTYPES[geometry.kv_dtype]

        def tensors(start: int, rows: int, stride_bytes: int) -> Rows:
            return np.ndarray(
                (geometry.tensors, rows, geometry.head_dim),
                dtype,
                memory,
                start,
                (stride_bytes, geometry.row_bytes, geometry.element_bytes),
            )

        scratch_offset = offset + layout.scratch_offset_bytes
        self.layout = layout
        self.array = tensors(offset, layout.rows, layout.stride_bytes)
        self.scratch = tensors(scratch_offset, layout.scratch_rows, layout.scratch_stride_bytes)
        self.array.fill(geometry.zero_point)
        self.scratch.fill(geometry.zero_point)

        base = memory.ctypes.data + offset
        scratch_base = memory.ctypes.data + scratch_offset
        scratch_tensors = geometry.tensors if layout.scratch_rows else 0
        self.addresses = [base + i * layout.stride_bytes for i in range(geometry.tensors)]
        self.scratch_addresses = [scratch_base + i * layout.scratch_stride_bytes for i in range(scratch_tensors)]
        self.row_bytes = geometry.row_bytes
        self.bytes_copied = 0
        self.copies = 0
        self._bytes_per_row = geometry.tensors * geometry.row_bytes
        self._held_bytes = memory.nbytes

    @property
    def bytes_held(self) -> int:
        """Bytes allocated, scratch and alignment included."""
        return self._held_bytes

    def view(self, tensor: int) -> Rows:
        """One tensor, `[rows, D]`, sharing the arena's memory."""
        return self.array[tensor]  # type: ignore[no-any-return]

    def execute(self, move: Move) -> None:
        """Copy rows in all tensors, as if the source had been read completely before the first row is written.

        Raises:
            ValueError: a row beyond the end of its tensor; nothing is copied then.
        """
        source, target = self._place(move.src), self._place(move.dst)
        if move.src_row + move.rows > source.shape[1] or move.dst_row + move.rows > target.shape[1]:
            raise ValueError(f"move: found {move}; wanted rows below {source.shape[1]} and {target.shape[1]}")
        if move.overlaps:
            self._shift(move)
        else:
            rows = source[:, move.src_row : move.src_row + move.rows]
            target[:, move.dst_row : move.dst_row + move.rows] = rows
        self.bytes_copied += move.rows * self._bytes_per_row
        self.copies += 1

    def _place(self, place: Place) -> Rows:
        return self.array if place == "arena" else self.scratch

    def _shift(self, move: Move) -> None:
        # numpy would buffer an overlapping copy of all tensors: as much memory again as the rows held.
        addresses = self.addresses if move.src == "arena" else self.scratch_addresses
        src_bytes, dst_bytes = move.src_row * self.row_bytes, move.dst_row * self.row_bytes
        size_bytes = move.rows * self.row_bytes
        for address in addresses:
            memmove(address + dst_bytes, address + src_bytes, size_bytes)
