"""Layers with a short convolution: their state, and the rows before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from edgekv.kv.arena import Arena, Rows
from edgekv.kv.memory import Allocate, HeapMemory
from edgekv.kv.rows import Layout, RowArena
from edgekv.kv.state import StateError
from edgekv.kv.strategies import OrderedSlot, make_strategy
from edgekv.kv.strategies.strategy import Move, Window
from edgekv.spec.geometry import ConvSpec, KvDtype, RowSpec

TAIL_TOKENS = 64
"""Tokens beyond a step that a state can be rewound by, so that blocks of tokens can still be stored after it."""


class _Rows(Protocol):
    """What a strategy must do for rows whose order matters; see `Strategy`."""

    @property
    def rows(self) -> int: ...

    @property
    def scratch_rows(self) -> int: ...

    @property
    def mirrored(self) -> bool: ...

    @property
    def length(self) -> int: ...

    def prepare(self, ar: int, columns: int) -> Sequence[Move]: ...

    def window(self, ar: int, columns: int) -> Window: ...

    def commit(self, tokens: int, evicted: int) -> Sequence[Move]: ...

    def rewind(self, tokens: int) -> Sequence[Move]: ...

    def reset(self, length: int = 0) -> None: ...

    def held_rows(self) -> list[int]: ...


def state_strip(geometry: ConvSpec, max_ar: int) -> RowSpec:
    """The rows that are kept of a state, as the window of a layer: the state itself, and a tail for rewinds.

    Strategies read the bytes of a row, so that the type is any of as many bytes.
    """
    dtype: KvDtype = "s16" if geometry.element_bytes == 2 else "u8"
    window = geometry.kernel + max_ar + TAIL_TOKENS
    return RowSpec(geometry.layers, 1, geometry.width, window, dtype, numbers=geometry.numbers)


def state_rows(name: str, geometry: ConvSpec, *, max_ar: int, reserve: object) -> _Rows:
    """Where the rows of states are, for the update strategy of the cache that they belong to.

    Args:
        name: of the strategy.
        geometry: of the states.
        max_ar: the most tokens per inference.
        reserve: of `pointer-shift`.

    Raises:
        UsageError: no such strategy.
    """
    strip = state_strip(geometry, max_ar)
    if name == "slot":
        return OrderedSlot(strip.window - 1, geometry.state_rows, max_ar=max_ar)
    return make_strategy(name, strip, max_ar=max_ar, reserve=reserve)  # type: ignore[arg-type]


class StateGroup:
    """Keeps the states of convolutions with a kernel of K: the K-1 rows before the next token.

    This is a checkpoint and a tail, without the checkpoint. A step reads the K-1 newest rows and writes AR new ones, of
    which the first n are kept, so padded and rejected tokens leave no trace:

        row      0                      past_row         new_row
                 |  older rows (tail)   |  K-1 rows      |  AR new rows  |
        commit                          |-> n rows ->    |

    Rows are moved as the cache's strategy says: `pointer-shift` and `mirror` move the window, `slot` writes the new
    rows and the state to fixed places at once. Older rows stay, so that a rewind within the tail is exact. Rows before
    the first token are 0.

    Attributes:
        geometry: the sizes, and the numbers of the layers.
        strategy: row positions and copies.
        arenas: all states.
        reallocations: always 0.
    """

    def __init__(
        self,
        geometry: ConvSpec,
        strategy: _Rows,
        max_ar: int,
        allocate: Allocate = HeapMemory,
    ) -> None:
        """Allocate; see `RowArena` for what is raised.

        Args:
            geometry: the sizes.
            strategy: see `state_rows`.
            max_ar: the most tokens per inference.
            allocate: where memory comes from.
        """
        self.geometry = geometry
        self.strategy = strategy
        self.reallocations = 0
        self._past_rows = geometry.state_rows
        self._capacity = state_strip(geometry, max_ar).window - 1
        self._arena = RowArena(Layout.of(geometry, strategy), allocate)
        self.arenas: tuple[Arena, ...] = (self._arena,)
        self._open: Window | None = None

    @property
    def length(self) -> int:
        return self.strategy.length

    @property
    def nbytes(self) -> int:
        return min(self.length, self._past_rows) * self.geometry.tensors * self.geometry.row_bytes

    def window(self, ar: int, context: int, block: int = 0) -> Window:
        for move in self.strategy.prepare(ar, self._past_rows):
            self._arena.execute(move)
        window = self.strategy.window(ar, self._past_rows)
        if window.first:
            rows = [(window.past_row + row) % self.strategy.rows for row in range(window.first)]
            self._arena.array[:, rows] = self.geometry.zero_point
            window = replace(window, first=0)
        self._open = window
        return window

    def compact(self, first: int, rows: Sequence[int]) -> None:
        assert self._open is not None, "the cache has opened a step"
        self._arena.compact(self._open, first, rows)

    def commit(self, tokens: int) -> None:
        evicted = max(0, self.length + tokens - self._capacity)
        for move in self.strategy.commit(tokens, evicted):
            self._arena.execute(move)

    def can_rewind(self, tokens: int, seen: int) -> bool:
        return self.length == seen or self.length - tokens >= self._past_rows

    def rewind(self, tokens: int) -> None:
        for move in self.strategy.rewind(tokens):
            self._arena.execute(move)

    def reset(self, tokens: int = 0) -> None:
        self.strategy.reset(min(tokens, self._past_rows))

    def snapshot(self, back: int = 0) -> Mapping[str, Rows]:
        """The state, or that of `back` tokens ago, which `can_rewind` says is there."""
        end = self.length - back
        rows = self.strategy.held_rows()[max(0, end - self._past_rows) : end]
        return {
            tensor.past: np.ascontiguousarray(self._arena.read(at, rows))
            for at, tensor in enumerate(self._arena.tensors)
        }

    def newest(self) -> Rows:
        """A copy of what the next token reads, `[N, K-1, H]`: 0 where there was no token."""
        held = self.strategy.held_rows()[-self._past_rows :]
        shape = len(self._arena.tensors), self._past_rows, self.geometry.width
        rows = np.full(shape, self.geometry.zero_point, self._arena.dtype)
        if held:
            rows[:, -len(held) :] = self._arena.array[:, held]
        return rows

    def check(self, rows: Mapping[str, Rows], tokens: int | None) -> None:
        count = self._past_rows if tokens is None else min(tokens, self._past_rows)
        for tensor in self._arena.tensors:
            values = rows.get(tensor.past, np.empty(0))
            if values.dtype != self._arena.dtype or values.shape != (count, self.geometry.width):
                raise StateError(
                    f"state: {tensor.past}",
                    got=f"{values.dtype} {list(values.shape)}",
                    expected=f"{self._arena.dtype} {[count, self.geometry.width]}",
                    fix="Save the state again from a cache of this kind.",
                )

    def restore(self, rows: Mapping[str, Rows]) -> None:
        self.reset(len(rows[self._arena.tensors[0].past]))
        held = self.strategy.held_rows()
        for at, tensor in enumerate(self._arena.tensors):
            self._arena.write(at, held, rows[tensor.past][-len(held) or None :])
