"""Groups of layers whose rows are stored together, and where these rows come from and go to."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edgekv.kv import KVCache
from edgekv.spec.geometry import RowSpec
from edgekv.spec.layers import Geometry

Rows = NDArray[Any]
_ALIGNED_PAGES = 64  # of a smaller block, a page more would be too much


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """The layers of one attention window, number of heads and head width.

    The rows of a block are in the order of the geometry's names: by layer, keys before values, by head.

    Attributes:
        geometry: of these layers; its `context` is their window, or S for full attention.
        window: tokens that a token attends to, including itself; None for full attention.
    """

    geometry: RowSpec
    window: int | None

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's rows in all tensors."""
        return self.geometry.tensors * self.geometry.row_bytes

    def shape(self, tokens: int) -> tuple[int, int, int]:
        """Shape of the rows of so many tokens: `[tensors, tokens, D]`."""
        return self.geometry.tensors, tokens, self.geometry.head_dim

    def empty(self, tokens: int, dtype: np.dtype[Any]) -> Rows:
        """Rows to be filled, at the start of a page if they are many: each tensor's are copied to a place of its own,
        and a copy that crosses a page takes twice as long.
        """
        shape = self.shape(tokens)
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes < _ALIGNED_PAGES * mmap.PAGESIZE:
            return np.empty(shape, dtype)
        memory = np.empty(size_bytes + mmap.PAGESIZE, np.uint8)
        start = -memory.ctypes.data % mmap.PAGESIZE
        return memory[start : start + size_bytes].view(dtype).reshape(shape)

    def first_needed(self, tokens: int) -> int:
        """Index of the first of `tokens` past tokens that the next one attends to."""
        return 0 if self.window is None else max(0, tokens - self.window + 1)


def split_layers(geometry: Geometry) -> tuple[BlockGroup, ...]:
    """The groups of a geometry that have rows, full attention first, then the widest window first."""
    ordered = sorted(geometry.rows(), key=lambda group: (group.window, group.kv_heads, group.head_dim), reverse=True)
    return tuple(BlockGroup(group, None if group.window == geometry.context else group.window) for group in ordered)


class Source(Protocol):
    """Provides the rows of a sequence."""

    def first(self, group: int) -> int:
        """The first token whose rows a group has; all later ones are available too."""

    def read(self, group: int, token: int, out: Rows) -> None:
        """Copy a group's rows of consecutive tokens, from `token` on, to `out`, `[tensors, tokens, D]`."""


class Target(Protocol):
    """Receives the rows of a sequence."""

    def write(self, group: int, token: int, rows: Rows) -> None:
        """Receive a group's rows of consecutive tokens, from `token` on, `[tensors, tokens, D]`."""


class GroupRows:
    """An array `[tensors, tokens, D]` for each group; a `Source` and a `Target`."""

    def __init__(self, rows: Sequence[Rows], first: Sequence[int] = ()) -> None:
        self._rows = rows
        self._first = first or [0] * len(rows)  # the tokens of the first rows

    def first(self, group: int) -> int:
        return self._first[group]

    def read(self, group: int, token: int, out: Rows) -> None:
        start = token - self._first[group]
        out[...] = self._rows[group][:, start : start + out.shape[1]]

    def write(self, group: int, token: int, rows: Rows) -> None:
        start = token - self._first[group]
        self._rows[group][:, start : start + rows.shape[1]] = rows


class CacheRows:
    """The rows in a cache; a `Source` and a `Target`.

    No step, rewind or reset may move them while this object is used.
    """

    def __init__(self, cache: KVCache, groups: Sequence[BlockGroup]) -> None:
        """Find the groups' tensors in a cache of the same layers."""
        self._homes = cache.groups
        self._spans = _spans(cache, tuple(groups))
        homes = {span.home for spans in self._spans for span in spans}
        self._rows = {home: cache.groups[home].strategy.held_rows() for home in homes}
        self._first = [cache.tokens_seen - cache.groups[spans[0].home].length for spans in self._spans]

    def first(self, group: int) -> int:
        return self._first[group]

    def read(self, group: int, token: int, out: Rows) -> None:
        start = token - self._first[group]
        for span in self._spans[group]:
            held = self._rows[span.home][start : start + out.shape[1]]
            self._homes[span.home].arenas[span.arena].copy_out(span.tensors, held, out[span.part])

    def write(self, group: int, token: int, rows: Rows) -> None:
        """As in `Target`; tokens outside the layers' window are skipped."""
        skipped = max(self._first[group] - token, 0)
        start = max(token - self._first[group], 0)
        for span in self._spans[group]:
            held = self._rows[span.home][start : start + max(rows.shape[1] - skipped, 0)]
            piece = rows[span.part, skipped : skipped + len(held)]
            self._homes[span.home].arenas[span.arena].copy_in(span.tensors, held, piece)


class _Span(NamedTuple):
    """Where a cache has consecutive tensors of a block: its group, the group's arena, and the ranges in both."""

    home: int
    arena: int
    tensors: slice
    part: slice


_known_spans: WeakKeyDictionary[KVCache, dict[tuple[BlockGroup, ...], list[list[_Span]]]] = WeakKeyDictionary()


def _spans(cache: KVCache, groups: tuple[BlockGroup, ...]) -> list[list[_Span]]:
    """Each group's tensors in as few spans as possible: found once for a cache, which may have thousands."""
    known = _known_spans.setdefault(cache, {})
    if groups not in known:
        places = {
            tensor: (home, arena, at)
            for home, group in enumerate(cache.groups)
            for arena, memory in enumerate(group.arenas)
            for at, tensor in enumerate(memory.tensors)
        }
        known[groups] = [_joined([places[tensor] for tensor in group.geometry.names()]) for group in groups]
    return known[groups]


def _joined(places: Sequence[tuple[int, int, int]]) -> list[_Span]:
    spans: list[_Span] = []
    shifted = ((home, arena, at - part) for part, (home, arena, at) in enumerate(places))  # equal in one span
    for (home, arena, shift), run in groupby(shifted):
        start = spans[-1].part.stop if spans else 0
        end = start + len([*run])
        spans.append(_Span(home, arena, slice(start + shift, end + shift), slice(start, end)))
    return spans
