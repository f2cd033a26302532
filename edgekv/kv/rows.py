"""Tensors stored row by row: one aligned allocation for all heads, and the copies in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import memmove
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from edgekv.kv.arena import DTYPES, Rows, as_index
from edgekv.kv.memory import ALIGNMENT_BYTES, Allocate, HeapMemory, Memory, MirrorMemory, aligned
from edgekv.kv.strategies.strategy import Move, Place, Window
from edgekv.spec.geometry import KINDS, Geometry, Kind, KvTensor


class _Sizes(Protocol):
    """What of a strategy matters here."""

    @property
    def rows(self) -> int: ...

    @property
    def scratch_rows(self) -> int: ...

    @property
    def mirrored(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors of `rows` rows, then as many scratch tensors of `scratch_rows` rows, each on a 64-byte boundary.

    Attributes:
        geometry: the sizes of the cache.
        rows: rows of each tensor; at least 1.
        scratch_rows: rows of each scratch tensor, or 0 for none.
        mirrored: whether each tensor is a ring of whole pages that is mapped twice; then there is no scratch.
        kinds: the kinds of tensors: keys, values or both; or states.
    """

    geometry: Geometry
    rows: int
    scratch_rows: int = 0
    mirrored: bool = False
    kinds: tuple[Kind, ...] = KINDS

    def __post_init__(self) -> None:
        if self.rows < 1 or self.scratch_rows < 0 or (self.mirrored and self.scratch_rows):
            raise ValueError(f"layout: got {self}; expected rows >= 1 and scratch_rows >= 0, 0 if mirrored")

    @classmethod
    def of(cls, geometry: Geometry, strategy: _Sizes, kinds: tuple[Kind, ...] | None = None) -> Layout:
        """The layout for a strategy."""
        return cls(geometry, strategy.rows, strategy.scratch_rows, strategy.mirrored, kinds or geometry.kinds)

    @property
    def tensors(self) -> int:
        """Number of tensors: N, or half of it for only keys or only values."""
        return self.geometry.tensors // len(self.geometry.kinds) * len(self.kinds)

    def names(self) -> Iterator[KvTensor]:
        """The tensors, in the order of the geometry."""
        return (tensor for tensor in self.geometry.names() if tensor.kind in self.kinds)

    @property
    def reach_rows(self) -> int:
        """Rows that can be addressed in each tensor: each row twice if it is mirrored."""
        return 2 * self.rows if self.mirrored else self.rows

    @property
    def stride_bytes(self) -> int:
        """From one tensor to the next, as addresses count."""
        return aligned(self.reach_rows * self.geometry.row_bytes)

    @property
    def scratch_stride_bytes(self) -> int:
        """From one scratch tensor to the next."""
        return aligned(self.scratch_rows * self.geometry.row_bytes)

    @property
    def scratch_offset_bytes(self) -> int:
        """From the first tensor to the first scratch tensor."""
        return self.tensors * self.stride_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated: all tensors, and slack for aligning the first one."""
        if self.mirrored:
            return self.tensors * self.rows * self.geometry.row_bytes
        return self.tensors * (self.stride_bytes + self.scratch_stride_bytes) + ALIGNMENT_BYTES


class RowArena:
    """Memory for a layout, filled with the zero point; an `Arena`. Tensors are in the order of `Geometry.names()`.

    Attributes:
        layout: sizes and offsets in bytes.
        tensors: which tensors, in order.
        array: all tensors, `[N, rows, D]`; the rows of one tensor are contiguous. A mirrored layout has each row
            once here; the second mapping is reached by address only.
        scratch: receives new rows that are copied later, `[N, scratch_rows, D]`.
        addresses: base address of each tensor, a multiple of 64; row r is `r * row_bytes` further.
        scratch_addresses: base address of each scratch tensor, a multiple of 64; empty without scratch rows.
        row_bytes: bytes of one row.
        bytes_held: bytes allocated, including scratch and alignment; memory mapped twice counts once.
        bytes_copied: bytes that `execute` has written so far.
        copies: moves that it has executed so far.
    """

    def __init__(self, layout: Layout, allocate: Allocate = HeapMemory) -> None:
        """Allocate and fill; a mirrored layout maps memory of its own.

        Raises:
            UsageError: the layout is mirrored, and this system cannot map memory twice.
            EngineError: the layout is mirrored, and the system refused the mapping.
        """
        geometry = layout.geometry
        memory: Memory
        if layout.mirrored:
            memory = MirrorMemory(layout.tensors, layout.rows * geometry.row_bytes)
        else:
            memory = allocate(layout.allocated_bytes)
        dtype = DTYPES[geometry.kv_dtype]

        def tensors(start: int, rows: int, stride_bytes: int) -> Rows:
            return np.ndarray(
                (layout.tensors, rows, geometry.head_dim),
                dtype,
                memory.buffer,
                memory.offset + start,
                (stride_bytes, geometry.row_bytes, geometry.element_bytes),
            )

        self.layout = layout
        self.tensors = tuple(layout.names())
        self.array = tensors(0, layout.rows, layout.stride_bytes)
        # Without scratch rows there are no bytes after the tensors for an array.
        scratch_offset = layout.scratch_offset_bytes if layout.scratch_rows else 0
        self.scratch = tensors(scratch_offset, layout.scratch_rows, layout.scratch_stride_bytes)
        self.array.fill(geometry.zero_point)
        self.scratch.fill(geometry.zero_point)

        scratch_base = memory.address + scratch_offset
        scratch_tensors = layout.tensors if layout.scratch_rows else 0
        self.addresses = [memory.address + i * layout.stride_bytes for i in range(layout.tensors)]
        self.scratch_addresses = [scratch_base + i * layout.scratch_stride_bytes for i in range(scratch_tensors)]
        self.row_bytes = geometry.row_bytes
        self.bytes_copied = 0
        self.copies = 0
        self._bytes_per_row = layout.tensors * geometry.row_bytes
        self._places: dict[Place, tuple[Rows, int]] = {  # with the rows that can be addressed
            "arena": (self.array, layout.reach_rows),
            "scratch": (self.scratch, layout.scratch_rows),
        }
        self.bytes_held = memory.held_bytes

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def past_shape(self, columns: int) -> list[int]:
        return [1, 1, columns, self.layout.geometry.head_dim]

    def new_shape(self, ar: int) -> list[int]:
        return [1, 1, ar, self.layout.geometry.head_dim]

    def past_offset_bytes(self, window: Window) -> int:
        return window.past_row * self.row_bytes

    def new_addresses(self, window: Window) -> list[int]:
        return self.addresses if window.in_place else self.scratch_addresses

    def new_offset_bytes(self, window: Window) -> int:
        return window.new_row * self.row_bytes

    def read(self, tensor: int, rows: Sequence[int]) -> Rows:
        return self.array[tensor, rows]

    def write(self, tensor: int, rows: Sequence[int], values: Rows) -> None:
        self.array[tensor, rows] = values

    def copy_out(self, tensors: slice, rows: Sequence[int], out: Rows) -> None:
        out[...] = self.array[tensors, as_index(rows)]

    def copy_in(self, tensors: slice, rows: Sequence[int], values: Rows) -> None:
        self.array[tensors, as_index(rows)] = values

    def compact(self, window: Window, first: int, rows: Sequence[int]) -> None:
        place, size = (self.array, self.layout.rows) if window.in_place else (self.scratch, self.layout.scratch_rows)
        targets = range(window.new_row + first, window.new_row + first + len(rows))
        sources = [(window.new_row + row) % size for row in rows]
        place[:, [row % size for row in targets]] = place[:, sources]
        self.bytes_copied += len(rows) * self._bytes_per_row
        self.copies += 1

    def view(self, tensor: int) -> Rows:
        """One tensor, `[rows, D]`, sharing the arena's memory."""
        return self.array[tensor]  # type: ignore[no-any-return]

    def execute(self, move: Move) -> None:
        """Copy rows in all tensors, as if the source had been read completely before the first row is written.

        Raises:
            ValueError: a row beyond the end of its tensor; nothing is copied then.
        """
        (source, source_rows), (target, target_rows) = self._places[move.src], self._places[move.dst]
        if move.src_row + move.rows > source_rows or move.dst_row + move.rows > target_rows:
            raise ValueError(f"move: got {move}; expected rows below {source_rows} and {target_rows}")
        if move.src == move.dst:
            self._shift(move)
        else:
            rows = source[:, move.src_row : move.src_row + move.rows]
            target[:, move.dst_row : move.dst_row + move.rows] = rows
        self.bytes_copied += move.rows * self._bytes_per_row
        self.copies += 1

    def append(self, row: int, rows: int) -> None:
        """Copy the first rows of the scratch to `row` and after it, in all tensors; both must be there."""
        self.array[:, row : row + rows] = self.scratch[:, :rows]
        self.bytes_copied += rows * self._bytes_per_row
        self.copies += 1

    def _shift(self, move: Move) -> None:
        # numpy cannot tell that strided rows of one array are disjoint and would buffer the copy of all tensors.
        addresses = self.addresses if move.src == "arena" else self.scratch_addresses
        src_bytes, dst_bytes = move.src_row * self.row_bytes, move.dst_row * self.row_bytes
        size_bytes = move.rows * self.row_bytes
        for address in addresses:
            memmove(address + dst_bytes, address + src_bytes, size_bytes)
