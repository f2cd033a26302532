"""Layers with a gated delta rule or Mamba-2: the matrices S at a checkpoint, and a tail of rows since then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from edgekv.kv.arena import Arena, Rows
from edgekv.kv.memory import Allocate, HeapMemory
from edgekv.kv.policies.rotation import KvEncoding
from edgekv.kv.rows import Layout, RowArena
from edgekv.kv.state import StateError
from edgekv.kv.strategies.strategy import Move, Window
from edgekv.spec.geometry import CHECKPOINT_TOKENS, DeltaSpec

Floats = NDArray[np.float32]
_FOLDED_ELEMENTS = 1 << 18
"""Elements of S whose checkpoints are computed together: few enough that their floats stay in a processor's cache."""


def fold(state: NDArray[np.float32], keys: Floats, values: Floats, decays: Floats, *, corrects: bool = True) -> Floats:
    """S after the tokens of some rows: `e^G S + sum of e^(G - G_j) k_j d_j^T`, G_j the sum of g up to j, G of all.

    Without corrections, `d_j = g_j v_j`.

    Args:
        state: S by head, `[..., heads, key_dim, value_dim]`.
        keys: k, `[..., T, key_heads, key_dim]`; consecutive heads of S share one.
        values: d, or v without corrections, `[..., T, heads, value_dim]`.
        decays: g, `[..., T, heads]`.
        corrects: see `DeltaSpec`.
    """
    totals = decays.astype(np.float64).cumsum(-2)
    left = np.exp(totals[..., -1:, :] - totals).astype(np.float32)
    left = left if corrects else left * decays
    key_heads, heads = keys.shape[-2], values.shape[-2]
    left = left.reshape(*left.shape[:-1], key_heads, heads // key_heads)
    weighted = keys[..., None, :] * left[..., None]  # [..., T, key_heads, heads of each, key_dim]
    weighted = np.moveaxis(weighted.reshape(*values.shape[:-1], -1), -3, -1)  # [..., heads, key_dim, T]
    added = weighted @ np.moveaxis(values, -3, -2)
    kept: Floats = np.exp(totals[..., -1, :, None, None]).astype(np.float32) * state
    return kept + added


@cache
def _tail_window(ar: int) -> Window:
    rows = CHECKPOINT_TOKENS
    return Window(ar, rows, rows, 0, in_place=False, first=0, stop=rows)


@cache
def _checkpoint_window(ar: int, rows: int) -> Window:
    return Window(ar, rows, 0, 0, in_place=True, first=0, stop=rows)


def tail_layout(geometry: DeltaSpec, max_ar: int) -> Layout:
    """The memory of the rows of these layers, or of two matrices S of each, which no step writes."""
    scratch_rows = 0 if geometry.kind == "recurrent" else max_ar
    return Layout(geometry, 2 * geometry.rows, scratch_rows, kinds=geometry.kinds)


class TailGroup:
    """Rows of the tokens since the checkpoint and of those between it and the one before; a `CacheGroup`.

        row  0                            64                             128
             |  64 rows before checkpoint  |  rows since then  |  zeros  |
                                           past_row

    A step reads 64 rows from the checkpoint on, and `commit` copies its new rows behind those held: no address changes,
    whatever the cache's strategy. The rows before stay, so that at least 64 tokens can be rewound.

    Attributes:
        geometry: the sizes, and the numbers of the layers.
        arenas: all tensors.
        reallocations: always 0.
        since: tokens held since the checkpoint, below 64 but within `KVCache.commit`.
        before: rows held of those before the checkpoint, 0 or 64.
    """

    def __init__(self, geometry: DeltaSpec, max_ar: int, allocate: Allocate = HeapMemory) -> None:
        """Allocate; see `RowArena` for what is raised."""
        self.geometry = geometry
        self.reallocations = 0
        self.arena = RowArena(tail_layout(geometry, max_ar), allocate)
        self.arenas: tuple[Arena, ...] = (self.arena,)
        self.since = self.before = 0
        self._open: Window | None = None

    @property
    def strategy(self) -> TailGroup:
        return self

    def held_rows(self) -> list[int]:
        """The rows of the tokens held."""
        return list(range(CHECKPOINT_TOKENS - self.before, CHECKPOINT_TOKENS + self.since))

    @property
    def length(self) -> int:
        return self.before + self.since

    @property
    def nbytes(self) -> int:
        return self.length * self.geometry.tensors * self.geometry.row_bytes

    def window(self, ar: int, context: int, block: int = 0) -> Window:
        self._open = _tail_window(ar)
        return self._open

    def compact(self, first: int, rows: Sequence[int]) -> None:
        assert self._open is not None, "the cache has opened a step"
        self.arena.compact(self._open, first, rows)

    def commit(self, tokens: int) -> None:
        if tokens:
            self.arena.append(CHECKPOINT_TOKENS + self.since, tokens)
            self.since += tokens

    def can_rewind(self, tokens: int, seen: int) -> bool:
        return tokens <= self.length

    def rewind(self, tokens: int) -> None:
        if tokens > self.since:
            self.arena.execute(Move(0, CHECKPOINT_TOKENS, CHECKPOINT_TOKENS))
            self.since, self.before = self.length, 0
        self.since -= tokens
        self._clear()

    def reset(self, tokens: int = 0) -> None:
        self.since = self.before = 0
        self._clear()

    def rows_since(self) -> Rows:
        """The rows since the checkpoint, `[N, tokens, width]`."""
        held: Rows = self.arena.array[:, CHECKPOINT_TOKENS : CHECKPOINT_TOKENS + self.since]
        return held

    def begin(self) -> None:
        """Begin a tail at the newest token."""
        self.arena.execute(Move(CHECKPOINT_TOKENS, 0, CHECKPOINT_TOKENS))
        self.since, self.before = 0, CHECKPOINT_TOKENS
        self._clear()

    def snapshot(self, back: int = 0) -> Mapping[str, Rows]:
        """The rows since the checkpoint that a step reads, `back` tokens ago."""
        first, rows = CHECKPOINT_TOKENS, self.since - back
        if rows < 0:
            first, rows = 0, rows + self.before
        copied = self.arena.array[:, first : first + rows].copy()
        return {tensor.past: copied[at] for at, tensor in enumerate(self.arena.tensors)}

    def check(self, rows: Mapping[str, Rows], tokens: int | None) -> None:
        for tensor in self.arena.tensors:
            values = rows.get(tensor.past, np.empty(0))
            held = len(values) if tokens is None else tokens % CHECKPOINT_TOKENS
            shape = (held, self.geometry.width)
            if values.dtype != self.arena.dtype or values.shape != shape or held >= CHECKPOINT_TOKENS:
                raise _refusal(tensor.past, values, f"{self.arena.dtype} {[*shape]}")

    def restore(self, rows: Mapping[str, Rows]) -> None:
        self.reset()
        self.since = len(rows[self.arena.tensors[0].past])
        for at, tensor in enumerate(self.arena.tensors):
            self.rows_since()[at] = rows[tensor.past]

    def _clear(self) -> None:
        """Have 0 in the rows that no token has."""
        self.arena.array[:, CHECKPOINT_TOKENS + self.since :] = self.geometry.zero_point


class CheckpointGroup:
    """The matrices S of all heads after the tokens before the tail, and at the checkpoint before; a `CacheGroup`.

    A step reads the newer ones. The commit that completes 64 tokens since the checkpoint makes the next one: in floats,
    and rounded once. Checkpoints are at multiples of 64 tokens of the text, so the bits of a token's results do not
    depend on how the text was divided into steps.

    Attributes:
        geometry: the sizes, and the numbers of the layers.
        arenas: all matrices, as rows `[key_dim, heads * value_dim]`: the newer one, then the older one.
        reallocations: always 0.
    """

    def __init__(
        self,
        geometry: DeltaSpec,
        tails: Sequence[TailGroup],
        encodings: Sequence[KvEncoding],
        allocate: Allocate = HeapMemory,
    ) -> None:
        """Allocate; see `RowArena` for what is raised.

        Args:
            geometry: the sizes.
            tails: keys, corrections and decays of the same layers.
            encodings: of all tensors of `tails`, then of the matrices; all have the zero point of `geometry`.
            allocate: where memory comes from.

        Raises:
            ValueError: no encodings.
        """
        if not encodings:
            raise ValueError("encodings: got none; expected those of all tensors, which checkpoints are computed with")
        self.geometry = geometry
        self.reallocations = 0
        self._keys, self._values, self._decays = tails
        self._scales = np.array([encoding.scale for encoding in encodings], np.float32)
        self._arena = RowArena(tail_layout(geometry, 1), allocate)
        self.arenas: tuple[Arena, ...] = (self._arena,)
        rows = geometry.rows
        self._has_older = False
        self._newer, self._older = self._arena.array[:, :rows], self._arena.array[:, rows:]

    @property
    def strategy(self) -> TailGroup:
        return self._keys

    @property
    def length(self) -> int:
        return self._keys.length

    @property
    def nbytes(self) -> int:
        matrices = 1 + self._has_older
        return matrices * self.geometry.tensors * self.geometry.rows * self.geometry.row_bytes

    def window(self, ar: int, context: int, block: int = 0) -> Window:
        return _checkpoint_window(ar, self.geometry.rows)

    def compact(self, first: int, rows: Sequence[int]) -> None:
        """Nothing: no step writes matrices."""

    def commit(self, tokens: int) -> None:
        if self._keys.since == CHECKPOINT_TOKENS:
            self._older[:] = self._newer
            self._has_older = True
            self._fold()
            for tail in (self._keys, self._values, self._decays):
                tail.begin()

    def can_rewind(self, tokens: int, seen: int) -> bool:
        return tokens <= self.length

    def rewind(self, tokens: int) -> None:
        """After the tails: S of the older checkpoint, if they have lost all rows since the newer one."""
        if self._has_older and not self._keys.before:
            self._newer[:] = self._older
            self._has_older = False

    def reset(self, tokens: int = 0) -> None:
        self._newer.fill(self.geometry.zero_point)
        self._has_older = False

    def snapshot(self, back: int = 0) -> Mapping[str, Rows]:
        """A copy of what a step reads, `back` tokens ago."""
        held = self._older if back > self._keys.since else self._newer
        return {tensor.past: held[at].copy() for at, tensor in enumerate(self._arena.tensors)}

    def check(self, rows: Mapping[str, Rows], tokens: int | None) -> None:
        shape = (self.geometry.rows, self.geometry.width)
        for tensor in self._arena.tensors:
            values = rows.get(tensor.past, np.empty(0))
            if values.dtype != self._arena.dtype or values.shape != shape:
                raise _refusal(tensor.past, values, f"{self._arena.dtype} {[*shape]}")

    def restore(self, rows: Mapping[str, Rows]) -> None:
        self._has_older = False
        for at, tensor in enumerate(self._arena.tensors):
            self._newer[at] = rows[tensor.past]

    def _fold(self) -> None:
        layers, key_dim, heads = self.geometry.layers, self.geometry.rows, self._decays.geometry.heads
        counts = np.cumsum([layers, layers, layers * heads])
        key_scales, value_scales, decay_scales, scales = np.split(self._scales, counts)
        tokens, zero = CHECKPOINT_TOKENS, np.float32(self.geometry.zero_point)
        decays = (self._decays.rows_since()[..., 0] - zero) * decay_scales[:, None]
        decays = decays.reshape(layers, heads, tokens).swapaxes(1, 2)
        together = max(1, _FOLDED_ELEMENTS // self._newer[0].size)
        for first in range(0, layers, together):
            some = slice(first, first + together)
            scale = scales[some, None, None, None]
            held = (self._newer[some] - zero).reshape(len(scale), key_dim, heads, -1).swapaxes(1, 2) * scale
            keys = ((self._keys.rows_since()[some] - zero) * key_scales[some, None, None]).reshape(
                len(scale), tokens, -1, key_dim
            )
            values = ((self._values.rows_since()[some] - zero) * value_scales[some, None, None]).reshape(
                len(scale), tokens, heads, -1
            )
            folded = fold(held, keys, values, decays[some], corrects=self.geometry.corrects)
            rounded = np.clip(np.rint(folded / scale) + zero, 1, 2 * zero - 1)
            self._newer[some] = rounded.swapaxes(1, 2).reshape(len(scale), key_dim, -1)


def _refusal(name: str, got: Rows, expected: str) -> StateError:
    return StateError(
        f"state: {name}",
        got=f"{got.dtype} {list(got.shape)}",
        expected=expected,
        fix="Save the state again from a cache of this kind.",
    )
