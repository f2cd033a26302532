"""Layers with attention that share a geometry, a strategy and memory: a row per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import numpy as np

from edgekv.kv.arena import Arena, Rows
from edgekv.kv.cache_group import CacheGroup
from edgekv.kv.columns import ColumnArena, ColumnLayout
from edgekv.kv.memory import Allocate, HeapMemory
from edgekv.kv.policies.rotation import KvEncoding
from edgekv.kv.rows import Layout, RowArena
from edgekv.kv.state import StateError
from edgekv.kv.strategies.strategy import Move, Strategy, Window
from edgekv.spec.geometry import Geometry

T = TypeVar("T")


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
        geometry: Geometry,
        make_strategy: Callable[[Geometry], Strategy],
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

    def window(self, ar: int, context: int) -> Window:
        """Prepare a step of the AR-`ar` graph for a context of S; return its window."""
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
        self._open = window = strategy.window(ar, columns)
        visible = window.stop - window.first
        leaving = visible + ar - self.geometry.context  # columns that become invisible within the step
        if leaving <= 0:
            return window
        rows = strategy.held_rows()[-visible:][:leaving]
        return replace(window, leaving=tuple((row - window.past_row) % strategy.rows for row in rows))

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
            for move in strategy.commit(tokens, evicted):
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
                each = rows.get(tensor.past, np.empty(0))
                if tokens is None:
                    tokens = len(each)
                if each.dtype != arena.dtype or each.shape != (tokens, geometry.head_dim):
                    found, wanted = f"{each.dtype} {list(each.shape)}", f"{arena.dtype} {[tokens, geometry.head_dim]}"
                    raise StateError(f"state: {tensor.past}", got=found, expected=wanted, fix=fix)
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
        geometry = replace(self.geometry, context=min(self.geometry.context, context))
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
