"""Layers that share a geometry: one strategy in integers, and the memory that follows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from edgekv.kv.arena import Arena
from edgekv.kv.columns import ColumnArena, ColumnLayout
from edgekv.kv.geometry import Geometry
from edgekv.kv.layout import Layout
from edgekv.kv.move import Move
from edgekv.kv.store import Rows, Store
from edgekv.kv.strategy import Strategy
from edgekv.kv.window import Window

T = TypeVar("T")


class Group:
    """What `Strategy` decides, done to all tensors of these layers.

    Attributes:
        geometry: the sizes, and the numbers of the layers.
        strategy: where rows lie.
        stores: all tensors in one; or keys as columns, then values.
    """

    def __init__(self, geometry: Geometry, strategy: Strategy, ar: Sequence[int]) -> None:
        """Allocate; see `Arena` for what is raised."""
        self.geometry = geometry
        self.strategy = strategy
        self._keys: ColumnArena | None = None
        if geometry.key_layout == "columns":
            self._keys = ColumnArena(ColumnLayout.of(geometry, strategy, ar))
            self._arena = Arena(Layout.of(geometry, strategy, ("value",)))
            self.stores: tuple[Store, ...] = (self._keys, self._arena)
        else:
            self._arena = Arena(Layout.of(geometry, strategy))
            self.stores = (self._arena,)

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.strategy.length

    def window(self, ar: int) -> Window:
        """Make a step of the AR-`ar` graph possible and say what it sees."""
        strategy, keys = self.strategy, self._keys
        if keys is None:
            for move in strategy.prepare(ar):
                self._arena.execute(move)
            return strategy.window(ar)
        pitch = self.geometry.context - ar
        if pitch == keys.pitch and strategy.length <= pitch:
            self._execute(strategy.prepare(ar))
        else:
            before, pitch_before = strategy.held_rows(), keys.pitch
            moves = strategy.prepare(ar)
            self._execute(moves, values_only=True)
            if moves or pitch != pitch_before:
                keys.relocate(before, strategy.held_rows(), strategy.first_row(pitch), pitch)
        return strategy.window(ar)

    def commit(self, tokens: int, evicted: int) -> None:
        """Keep the first new rows of the open step; `evicted` of the oldest leave."""
        strategy, keys = self.strategy, self._keys
        if keys is None:
            for move in strategy.commit(tokens, evicted):
                self._arena.execute(move)
            return
        length = strategy.length + tokens - evicted
        if max(strategy.length, length) <= keys.pitch:
            # The graph never writes columns where they are kept.
            new_row = strategy.first_row(0)
            self._execute(strategy.commit(tokens, evicted))
            if tokens and not strategy.scratch_rows:
                keys.execute(Move(0, new_row, tokens, src="scratch"))
            return
        before = strategy.held_rows()[evicted:]
        self._execute(strategy.commit(tokens, evicted), values_only=True)
        pitch = keys.pitch if length <= keys.pitch else keys.layout.widest
        keys.relocate(before, strategy.held_rows(), strategy.first_row(pitch), pitch, tokens)

    def rewind(self, tokens: int) -> None:
        """Drop the newest tokens."""
        self._remove(range(self.length - tokens, self.length), self.strategy.rewind, tokens)

    def drop(self, ages: Sequence[int]) -> None:
        """Drop the tokens of these ages, ascending."""
        self._remove(ages, self.strategy.drop, ages)

    def reset(self, length: int = 0) -> None:
        """Drop all tokens, then hold `length` others, to be written."""
        self.strategy.reset(length)
        if self._keys is not None:
            pitch = self._keys.layout.widest
            self._keys.place(self.strategy.held_rows(), self.strategy.first_row(pitch), pitch)

    def read(self, store: Store, tensor: int, ages: slice = slice(None)) -> Rows:
        """Rows of one tensor of a store by age, oldest first, `[tokens, D]`."""
        return store.read(tensor, self.strategy.held_rows()[ages])

    def write(self, store: Store, tensor: int, values: Rows, ages: slice = slice(None)) -> None:
        """Set rows of one tensor of a store by age."""
        store.write(tensor, self.strategy.held_rows()[ages], values)

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
