"""Keys stored column by column, for runtimes that multiply by K transposed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.kv.arena import DTYPES, Rows, as_index
from edgekv.kv.memory import ALIGNMENT_BYTES, Allocate, HeapMemory, Memory, MirrorMemory, aligned
from edgekv.kv.strategies.strategy import Move, Strategy, Window
from edgekv.spec.geometry import KvTensor, RowSpec

_Indexes = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """For each key tensor a strip, extra columns that do not fit the strip, and a scratch, all in one block.

    A graph reads `[1, 1, D, P]`, P past rows: the columns of one dimension are contiguous, and the same column
    of the next dimension is P elements further. Element d of the token in row r is therefore at d*P + r of the strip.
    When the window moves on by one row, all its D*P elements move on by one element: the newest column of a dimension
    is written where the oldest column of the next one was. So S-1 rows of reserve cost S-1 elements, and a strip for
    `rows` rows is (D-1)*P + rows elements: (D+1)(S-1), and an overhang, for a pointer shift of reserve 2.

    A mirrored strip is a ring of `rows` elements that is mapped twice: as many bytes as the ring of the values, whose
    rows it counts D times around.

    Attributes:
        geometry: the sizes of the cache.
        rows: rows of the strategy, equal to those of the values.
        widest: the largest P of the graphs.
        max_ar: their largest AR: the maximum number of columns outside a window or in the scratch.
        mirrored: whether each strip is a ring of whole pages that is mapped twice.
    """

    geometry: RowSpec
    rows: int
    widest: int
    max_ar: int
    mirrored: bool = False

    @property
    def tensors(self) -> int:
        """Half of N: the keys."""
        return self.geometry.tensors // 2

    @property
    def strip_elements(self) -> int:
        """Elements that can be addressed: (D-1)*P + rows at the largest P; those of a ring twice."""
        return 2 * self.rows if self.mirrored else (self.geometry.head_dim - 1) * self.widest + self.rows

    @property
    def reach_rows(self) -> int:
        """Rows that can be addressed: behind the end of a ring those of a window and a step."""
        return self.rows + self.widest + self.max_ar if self.mirrored else self.rows

    @property
    def ring_bytes(self) -> int:
        """Of a mirrored strip."""
        return self.rows * self.geometry.element_bytes

    @property
    def extra_elements(self) -> int:
        """`max_ar` columns."""
        return self.geometry.head_dim * self.max_ar

    @property
    def scratch_offset_bytes(self) -> int:
        """From a strip to its scratch, which holds D * max_ar elements."""
        return aligned((self.strip_elements + self.extra_elements) * self.geometry.element_bytes)

    @property
    def stride_bytes(self) -> int:
        """From one tensor to the next."""
        stride_bytes = self.scratch_offset_bytes + aligned(self.extra_elements * self.geometry.element_bytes)
        return -(-stride_bytes // PAGESIZE) * PAGESIZE if self.mirrored else stride_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated: all blocks, and slack for aligning the first one. Memory mapped twice counts once."""
        if self.mirrored:
            return self.tensors * (self.stride_bytes - self.ring_bytes)
        return self.tensors * self.stride_bytes + ALIGNMENT_BYTES

    @classmethod
    def of(cls, geometry: RowSpec, strategy: Strategy, ar: Sequence[int], context: int | None = None) -> ColumnLayout:
        """The layout for a strategy, with graphs of these AR and a largest context of S."""
        rows = strategy.rows * (geometry.head_dim if strategy.mirrored else 1)
        return cls(geometry, rows, geometry.past_rows(min(ar), context), max(ar), strategy.mirrored)

    def names(self) -> Iterator[KvTensor]:
        """The keys, in the order of the geometry."""
        return (tensor for tensor in self.geometry.names() if tensor.kind == "key")


class ColumnArena:
    """Memory for a column layout, filled with the zero point; an `Arena`.

    The stride between dimensions, P, is that of one graph's input, so all columns are rewritten when a graph of another
    P (another AR or context) runs. Tokens outside the window's P columns are kept in extra columns; other tensors keep
    them in rows that the graph does not see.

    Attributes:
        layout: sizes in elements and bytes.
        tensors: the keys, in order.
        pitch: current P.
        ar: tokens per inference of the step whose new columns the scratch takes.
        addresses: base address of each strip, a multiple of 64.
        bytes_copied: bytes written by the cache itself so far; D scattered elements for each appended token.
        copies: copies of one range of columns in all tensors so far.
    """

    def __init__(self, layout: ColumnLayout, allocate: Allocate = HeapMemory) -> None:
        """Allocate and fill; a mirrored layout maps memory of its own, and `RowArena` says what that may raise."""
        geometry = layout.geometry
        memory: Memory
        if layout.mirrored:
            memory = MirrorMemory(layout.tensors, layout.ring_bytes, layout.stride_bytes - 2 * layout.ring_bytes)
        else:
            memory = allocate(layout.allocated_bytes)
        element_bytes = geometry.element_bytes
        self.layout = layout
        self.tensors = tuple(layout.names())
        self.addresses = [memory.address + i * layout.stride_bytes for i in range(layout.tensors)]
        self.bytes_copied = 0
        self.copies = 0
        self._scratch_addresses = [address + layout.scratch_offset_bytes for address in self.addresses]
        self._scratch_element = layout.scratch_offset_bytes // element_bytes
        self._column_bytes = layout.tensors * geometry.row_bytes
        self.bytes_held = memory.held_bytes
        self._blocks: Rows = np.ndarray(
            (layout.tensors, layout.stride_bytes // element_bytes),
            DTYPES[geometry.kv_dtype],
            memory.buffer,
            memory.offset,
        )
        self._blocks.fill(geometry.zero_point)
        self._extra: dict[int, int] = {}  # rows outside of the window, and their extra columns
        self._set_pitch(layout.widest)
        self.open(layout.max_ar)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._blocks.dtype

    def past_shape(self, columns: int) -> list[int]:
        return [1, 1, self.layout.geometry.head_dim, columns]

    def new_shape(self, ar: int) -> list[int]:
        return [1, 1, self.layout.geometry.head_dim, ar]

    def past_offset_bytes(self, window: Window) -> int:
        return window.past_row * self.layout.geometry.element_bytes

    def new_addresses(self, window: Window) -> list[int]:
        return self._scratch_addresses

    def new_offset_bytes(self, window: Window) -> int:
        return 0

    def read(self, tensor: int, rows: Sequence[int]) -> Rows:
        columns: Rows = self._blocks[tensor, self._indexes(rows)]
        return columns.T

    def write(self, tensor: int, rows: Sequence[int], values: Rows) -> None:
        self._blocks[tensor, self._indexes(rows)] = values.T

    def copy_out(self, tensors: slice, rows: Sequence[int], out: Rows) -> None:
        index = as_index(rows)
        if self._extra or not isinstance(index, slice):
            out[...] = self._blocks[tensors, self._indexes(rows)].transpose(0, 2, 1)
        else:
            out[...] = self._strips[tensors, :, index].transpose(0, 2, 1)

    def copy_in(self, tensors: slice, rows: Sequence[int], values: Rows) -> None:
        index = as_index(rows)
        if self._extra or not isinstance(index, slice):
            self._blocks[tensors, self._indexes(rows)] = values.transpose(0, 2, 1)
        else:
            self._strips[tensors, :, index] = values.transpose(0, 2, 1)

    def row(self, row: int) -> Rows:
        column: Rows = self._strips[:, :, row % self.layout.rows]
        return column

    def new_row(self, window: Window, at: int) -> Rows:
        column: Rows = self._scratch[:, :, at]
        return column

    def compact(self, window: Window, first: int, rows: Sequence[int]) -> None:
        self._scratch[:, :, first : first + len(rows)] = self._scratch[:, :, rows]
        self._count(len(rows))

    def open(self, ar: int) -> None:
        """Prepare the scratch for the new columns of an AR step, `[D, AR]`."""
        head_dim, start = self.layout.geometry.head_dim, self._scratch_element
        self.ar = ar
        self._scratch: Rows = self._blocks[:, start : start + head_dim * ar].reshape(-1, head_dim, ar)

    def execute(self, move: Move) -> None:
        """Copy columns in all tensors; every token held, before and after, is within the window.

        Raises:
            ValueError: a move to the scratch, or a row that is not there; nothing is copied then.
        """
        if self.layout.mirrored:
            move = move.around(self.layout.rows)
        source_rows = self._scratch.shape[2] if move.src == "scratch" else self.layout.reach_rows
        target_rows = 0 if move.dst == "scratch" else self.layout.reach_rows
        if not (0 <= move.src_row <= source_rows - move.rows and 0 <= move.dst_row <= target_rows - move.rows):
            raise ValueError(f"move: got {move}; expected rows of 0 to {source_rows - 1} and 0 to {target_rows - 1}")
        to, start = slice(move.dst_row, move.dst_row + move.rows), slice(move.src_row, move.src_row + move.rows)
        if move.src == "scratch":
            self._strips[:, :, to] = self._scratch[:, :, start]
        else:
            # A dimension's end is the next one's start: read a whole tensor before writing it.
            for strip in self._strips:
                strip[:, to] = strip[:, start].copy()
        self._count(move.rows)

    def place(self, rows: Sequence[int], first_row: int, pitch: int) -> None:
        """Set the stride between dimensions to `pitch`; `rows` outside the window go to extra columns."""
        self._set_pitch(pitch)
        self._extra = {row: column for column, row in enumerate(self._outside(rows, first_row, pitch))}

    def _outside(self, rows: Sequence[int], first_row: int, pitch: int) -> list[int]:
        """Those that are not in a window."""
        if self.layout.mirrored:
            return [row for row in rows if (row - first_row) % self.layout.rows >= pitch]
        return [row for row in rows if not first_row <= row < first_row + pitch]

    def relocate(
        self, before: Sequence[int], after: Sequence[int], first_row: int, pitch: int, appended: int = 0
    ) -> None:
        """Rewrite all columns held.

        Args:
            before: current rows of the tokens that stay, oldest first.
            after: their new rows, then those of the appended tokens.
            first_row: first row of the new window.
            pitch: columns of the new window.
            appended: columns of the scratch that are kept.
        """
        strips, held, rows = self._strips, as_index(before), as_index(after)
        are_runs = isinstance(held, slice) and isinstance(rows, slice) and not appended
        if not are_runs or self._extra or self._outside(after, first_row, pitch):
            source = np.concatenate((self._indexes(before), self._scratch_indexes(appended)), axis=1)
            self.place(after, first_row, pitch)
            if after:
                target = self._indexes(after)
                for block in self._blocks:
                    block[target] = block[source]
        else:
            # Neighbouring elements together take a tenth of the time of single ones.
            self.place(after, first_row, pitch)
            for old, new in zip(strips, self._strips, strict=True):
                new[:, rows] = old[:, held].copy()
        if after:
            self._count(len(after))

    def _count(self, columns: int) -> None:
        self.bytes_copied += columns * self._column_bytes
        self.copies += 1

    def _set_pitch(self, pitch: int) -> None:
        geometry, blocks = self.layout.geometry, self._blocks
        stride_bytes, element_bytes = blocks.strides
        self.pitch = pitch
        self._strips: Rows = np.lib.stride_tricks.as_strided(
            blocks,
            (self.layout.tensors, geometry.head_dim, self.layout.reach_rows),
            (stride_bytes, pitch * element_bytes, element_bytes),
        )

    def _indexes(self, rows: Sequence[int]) -> _Indexes:
        """Indices of these rows' elements in a block, `[D, len(rows)]`."""
        dimensions = np.arange(self.layout.geometry.head_dim)[:, None]
        indexes: _Indexes = dimensions * self.pitch + np.asarray(rows, np.int64)
        if self._extra:
            for at, row in enumerate(rows):
                if row in self._extra:
                    extra = self.layout.strip_elements + self._extra[row]
                    indexes[:, at] = extra + dimensions[:, 0] * self.layout.max_ar
        return indexes

    def _scratch_indexes(self, columns: int) -> _Indexes:
        dimensions = np.arange(self.layout.geometry.head_dim)[:, None]
        return self._scratch_element + dimensions * self.ar + np.arange(columns)
