"""Tensors stored row by row, and the layers with attention that keep a row per token in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import memmove
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import Any, Protocol, TypeVar

import numpy as np

from edgekv.kv.arena import DTYPES, Arena, Rows, as_index
from edgekv.kv.cache_group import CacheGroup
from edgekv.kv.columns import ColumnArena, ColumnLayout
from edgekv.kv.memory import ALIGNMENT_BYTES, Allocate, HeapMemory, Memory, MirrorMemory, aligned
from edgekv.kv.policies.rotation import KvEncoding
from edgekv.kv.state import StateError
from edgekv.kv.strategies.slot import Slot
from edgekv.kv.strategies.strategy import Move, Place, Strategy, Window
from edgekv.spec.geometry import KINDS, Kind, KvTensor, LayerSpec, RowSpec

T = TypeVar("T")


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
        geometry: the sizes of the layers.
        rows: rows of each tensor; at least 1.
        scratch_rows: rows of each scratch tensor, or 0 for none.
        mirrored: whether each tensor is a ring of whole pages that is mapped twice; then there is no scratch.
        kinds: the kinds of tensors: keys, values or both; or states.
    """

    geometry: LayerSpec
    rows: int
    scratch_rows: int = 0
    mirrored: bool = False
    kinds: tuple[Kind, ...] = KINDS

    def __post_init__(self) -> None:
        if self.rows < 1 or self.scratch_rows < 0 or (self.mirrored and self.scratch_rows):
            raise ValueError(f"layout: got {self}; expected rows >= 1 and scratch_rows >= 0, 0 if mirrored")

    @classmethod
    def of(cls, geometry: LayerSpec, strategy: _Sizes, kinds: tuple[Kind, ...] | None = None) -> Layout:
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
    def stride_rows(self) -> int:
        """From one tensor to the next, in rows: the fewest that end on a 64-byte boundary."""
        multiple = ALIGNMENT_BYTES // gcd(ALIGNMENT_BYTES, self.geometry.row_bytes)
        return -(-self.reach_rows // multiple) * multiple

    @property
    def stride_bytes(self) -> int:
        """From one tensor to the next, as addresses count."""
        return self.stride_rows * self.geometry.row_bytes

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
    """Memory for a layout, filled with the zero point; an `Arena`. Tensors are in the order of the geometry's names.

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
                (layout.tensors, rows, geometry.width),
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
        if geometry.zero_point:  # new memory is 0, and has no pages yet
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
        return [1, 1, columns, self.layout.geometry.width]

    def new_shape(self, ar: int) -> list[int]:
        return [1, 1, ar, self.layout.geometry.width]

    def stacked_shape(self, tensors: int) -> list[int]:
        """Shape of adjacent tensors as one. From a window's past row on, it reaches as far beyond the last of them."""
        return [1, tensors, self.layout.stride_rows, self.layout.geometry.width]

    def past_offset_bytes(self, window: Window) -> int:
        return window.past_row % self.layout.rows * self.row_bytes

    def new_addresses(self, window: Window) -> list[int]:
        return self.addresses if window.in_place else self.scratch_addresses

    def new_offset_bytes(self, window: Window) -> int:
        return window.new_row % self.layout.rows * self.row_bytes

    def read(self, tensor: int, rows: Sequence[int]) -> Rows:
        return self.array[tensor, self._around(rows)]

    def write(self, tensor: int, rows: Sequence[int], values: Rows) -> None:
        self.array[tensor, self._around(rows)] = values

    def copy_out(self, tensors: slice, rows: Sequence[int], out: Rows) -> None:
        out[...] = self.array[tensors, as_index(self._around(rows))]

    def copy_in(self, tensors: slice, rows: Sequence[int], values: Rows) -> None:
        self.array[tensors, as_index(self._around(rows))] = values

    def row(self, row: int) -> Rows:
        held: Rows = self.array[:, row % self.layout.rows]
        return held

    def new_row(self, window: Window, at: int) -> Rows:
        if window.in_place:
            return self.row(window.new_row + at)
        row: Rows = self.scratch[:, window.new_row + at]
        return row

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
            ValueError: a row that its tensor does not have; nothing is copied then.
        """
        if self.layout.mirrored:
            move = move.around(self.layout.rows)
        (source, source_rows), (target, target_rows) = self._places[move.src], self._places[move.dst]
        if not (0 <= move.src_row <= source_rows - move.rows and 0 <= move.dst_row <= target_rows - move.rows):
            raise ValueError(f"move: got {move}; expected rows of 0 to {source_rows - 1} and 0 to {target_rows - 1}")
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

    def _around(self, rows: Sequence[int]) -> Sequence[int]:
        """Rows of a ring that keys as columns count on behind its end."""
        return [row % self.layout.rows for row in rows] if self.layout.mirrored else rows

    def _shift(self, move: Move) -> None:
        # numpy cannot tell that strided rows of one array are disjoint and would buffer the copy of all tensors.
        addresses = self.addresses if move.src == "arena" else self.scratch_addresses
        src_bytes, dst_bytes = move.src_row * self.row_bytes, move.dst_row * self.row_bytes
        size_bytes = move.rows * self.row_bytes
        for address in addresses:
            memmove(address + dst_bytes, address + src_bytes, size_bytes)


@dataclass(frozen=True, slots=True)
class HeldKeys:
    """The keys of one head.

    Attributes:
        arena: their memory.
        tensor: index of the tensor in the arena.
        rows: of the tokens held, oldest first.
        zero_point: the integer that represents 0.0.
        scale: of the encoding, if it is known.
    """

    arena: Arena
    tensor: int
    rows: Sequence[int]
    zero_point: int
    scale: float | None


class RowGroup:
    """Applies a `Strategy` to all tensors of these layers; a `CacheGroup`.

    Attributes:
        geometry: the sizes, and the numbers of the layers.
        strategy: row positions and copies.
        arenas: all tensors in one; or keys as columns, then values.
        capacity: maximum number of tokens held; the oldest are evicted when more are committed.
        context: S of the largest graph that the memory serves.
        reallocations: number of reallocations, which change the arenas' addresses.
    """

    strategy: Strategy
    arenas: tuple[Arena, ...]

    def __init__(
        self,
        geometry: RowSpec,
        make_strategy: Callable[[RowSpec], Strategy],
        ar: Sequence[int],
        capacity: int,
        context: int,
        allocate: Allocate = HeapMemory,
    ) -> None:
        """Allocate for graphs of these AR and contexts up to `context`; see `RowArena` for what is raised."""
        self.geometry = geometry
        self.capacity = capacity
        self.reallocations = 0
        self._make_strategy = make_strategy
        self._past_rows = cache(geometry.past_rows)
        self._ar = ar
        self._allocate_bytes = allocate
        self._open: Window | None = None
        self._allocate(context)

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.strategy.length

    @property
    def nbytes(self) -> int:
        return self.length * self.geometry.tensors * self.geometry.row_bytes

    def window(self, ar: int, context: int, block: int = 0) -> Window:
        strategy, keys = self.strategy, self._keys
        columns = self._past_rows(ar, context)
        if keys is None:
            for move in strategy.prepare(ar, columns):
                self._arena.execute(move)
        else:
            if columns == keys.pitch and strategy.length <= columns:
                self._execute(strategy.prepare(ar, columns))
            else:
                before, pitch_before = strategy.held_rows(), keys.pitch
                moves = strategy.prepare(ar, columns)
                self._execute(moves, values_only=True)
                if moves or columns != pitch_before:
                    keys.relocate(before, strategy.held_rows(), strategy.first_row(columns), columns)
            keys.open(ar)
        if block:
            # None of an empty cache: a masked row would move the columns of new tokens, and so the order of sums.
            columns = min(columns, -(-min(strategy.length, columns) // block) * block)
        self._open = window = strategy.window(ar, columns)
        visible = window.stop - window.first
        leaving = visible + ar - self.geometry.window  # columns that become invisible within the step
        if leaving <= 0:
            return window
        rows = strategy.held_rows()[-visible:][:leaving]
        return replace(window, leaving=tuple((row - window.past_row) % strategy.rows for row in rows))

    @property
    def appends(self) -> bool:
        """Whether the row behind those that an AR-1 graph reads is that of its new token, or free."""
        return self._keys is None and (not self.strategy.scratch_rows or isinstance(self.strategy, Slot))

    def append_in_place(self) -> Window:
        """Have an AR-1 graph write the new row of the open step behind the rows in use, which it reads all."""
        window = self._open
        assert window is not None and self.appends and window.ar == 1, "a step of a graph that appends"
        if not window.in_place:  # the tokens held are the first rows
            window = replace(window, columns=window.stop, new_row=window.stop, in_place=True)
        assert (window.first, window.stop) == (0, window.columns), "a window of the rows in use"
        self._open = window
        return window

    def compact(self, first: int, rows: Sequence[int]) -> None:
        assert self._open is not None, "the cache has opened a step"
        for arena in self.arenas:
            arena.compact(self._open, first, rows)

    def grow(self, context: int) -> tuple[Arena, ...]:
        """Move the tokens held to memory for graphs of contexts up to `context`; return the former memory."""
        arenas, before = self.arenas, self.strategy.held_rows()
        self._allocate(context)
        self.reset(len(before))
        rows = self.strategy.held_rows()
        for old, new in zip(arenas, self.arenas, strict=True):
            for tensor in range(len(new.tensors)):
                new.write(tensor, rows, old.read(tensor, before))
            new.bytes_copied = old.bytes_copied + len(rows) * len(new.tensors) * self.geometry.row_bytes
            new.copies = old.copies + (1 if rows else 0)
        self.reallocations += 1
        return arenas

    def commit(self, tokens: int) -> None:
        """Keep the first new rows of the open step; drop the oldest tokens above `capacity`."""
        strategy, keys = self.strategy, self._keys
        evicted = max(0, strategy.length + tokens - self.capacity)
        if keys is None:
            window = self._open
            for move in strategy.commit(tokens, evicted):
                if window is not None and window.in_place and move.src == "scratch":
                    # `append_in_place`: the row is in the arena, most often where it is to be.
                    move = replace(move, src="arena", src_row=window.new_row + move.src_row)
                if (move.src, move.src_row) != (move.dst, move.dst_row):
                    self._arena.execute(move)
            return
        length = strategy.length + tokens - evicted
        if max(strategy.length, length) <= keys.pitch:
            # The graph writes new columns to the scratch only.
            new_row = strategy.first_row(0)
            self._execute(strategy.commit(tokens, evicted))
            if tokens and not strategy.scratch_rows:
                keys.execute(Move(0, new_row, tokens, src="scratch"))
            return
        before = strategy.held_rows()[evicted:]
        self._execute(strategy.commit(tokens, evicted), values_only=True)
        pitch = keys.pitch if length <= keys.pitch else keys.layout.widest
        keys.relocate(before, strategy.held_rows(), strategy.first_row(pitch), pitch, tokens)

    def can_rewind(self, tokens: int, seen: int) -> bool:
        """Whether nothing was evicted."""
        return self.length == seen

    def rewind(self, tokens: int) -> None:
        self._remove(range(self.length - tokens, self.length), self.strategy.rewind, tokens)

    def drop(self, ages: Sequence[int]) -> None:
        """Drop the tokens of these ages, ascending."""
        self._remove(ages, self.strategy.drop, ages)

    def reset(self, tokens: int = 0) -> None:
        self.strategy.reset(min(tokens, self.capacity))
        if self._keys is not None:
            pitch = self._keys.layout.widest
            self._keys.place(self.strategy.held_rows(), self.strategy.first_row(pitch), pitch)

    def snapshot(self) -> Mapping[str, Rows]:
        held = self.strategy.held_rows()
        return {
            tensor.past: np.ascontiguousarray(arena.read(at, held))
            for arena in self.arenas
            for at, tensor in enumerate(arena.tensors)
        }

    def restore(self, rows: Mapping[str, Rows]) -> None:
        self.reset(len(rows[self.arenas[0].tensors[0].past]))
        held = self.strategy.held_rows()
        for arena in self.arenas:
            for at, tensor in enumerate(arena.tensors):
                arena.write(at, held, rows[tensor.past])

    def check(self, rows: Mapping[str, Rows], tokens: int | None) -> None:
        geometry, fix = self.geometry, "Save the state again from a cache of this kind."
        for arena in self.arenas:
            for tensor in arena.tensors:
                values = rows.get(tensor.past, np.empty(0))
                if tokens is None:
                    tokens = len(values)
                if values.dtype != arena.dtype or values.shape != (tokens, geometry.head_dim):
                    got, expected = (
                        f"{values.dtype} {list(values.shape)}",
                        f"{arena.dtype} {[tokens, geometry.head_dim]}",
                    )
                    raise StateError(f"state: {tensor.past}", got=got, expected=expected, fix=fix)
        if tokens is not None and tokens > self.capacity:
            fix = "Rewind before saving, or restore it into a cache with the policy fail."
            raise StateError("state: tokens", got=tokens, expected=f"{self.capacity} at most", fix=fix)

    def keys(self, encodings: Sequence[KvEncoding]) -> Iterator[HeldKeys]:
        """The keys held, tensor by tensor; `encodings` is in the order of the geometry's names, or empty."""
        rows, number = self.strategy.held_rows(), {tensor: i for i, tensor in enumerate(self.geometry.names())}
        for arena in self.arenas:
            for at, tensor in enumerate(arena.tensors):
                if tensor.kind == "key":
                    encoding = encodings[number[tensor]] if encodings else None
                    zero_point = encoding.zero_point if encoding else self.geometry.zero_point
                    yield HeldKeys(arena, at, rows, zero_point, encoding.scale if encoding else None)

    def _allocate(self, context: int) -> None:
        geometry = replace(self.geometry, window=min(self.geometry.window, context))
        strategy = self._make_strategy(geometry)
        keys: ColumnArena | None = None
        arenas: tuple[Arena, ...]
        if geometry.key_layout == "columns":
            keys = ColumnArena(ColumnLayout.of(geometry, strategy, self._ar, context), self._allocate_bytes)
            values = RowArena(Layout.of(geometry, strategy, ("value",)), self._allocate_bytes)
            arenas = (keys, values)
        else:
            values = RowArena(Layout.of(geometry, strategy), self._allocate_bytes)
            arenas = (values,)
        # Last, so that a failed allocation changes nothing.
        self.strategy, self.context, self.arenas, self._keys, self._arena = strategy, context, arenas, keys, values

    def _remove(self, ages: Sequence[int], remove: Callable[[T], Sequence[Move]], what: T) -> None:
        strategy, keys = self.strategy, self._keys
        if keys is None or strategy.length <= keys.pitch:
            self._execute(remove(what))
            return
        gone = set(ages)
        before = [row for age, row in enumerate(strategy.held_rows()) if age not in gone]
        self._execute(remove(what), values_only=True)
        keys.relocate(before, strategy.held_rows(), strategy.first_row(keys.pitch), keys.pitch)

    def _execute(self, moves: Sequence[Move], *, values_only: bool = False) -> None:
        for move in moves:
            self._arena.execute(move)
            if self._keys is not None and not values_only:
                self._keys.execute(move)


def held_keys(
    groups: Sequence[CacheGroup], wide: Sequence[RowGroup], encodings: Sequence[KvEncoding]
) -> Iterator[HeldKeys]:
    """The keys of the `wide` groups, tensor by tensor."""
    start = 0
    for group in groups:
        if isinstance(group, RowGroup) and group in wide:
            yield from group.keys(encodings[start : start + group.geometry.tensors])
        start += group.geometry.tensors
