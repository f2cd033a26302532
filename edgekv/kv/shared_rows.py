"""The keys and values of several sequences in the window of one cache."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from edgekv.kv.arena import Arena, Rows
from edgekv.kv.cache import KVCache
from edgekv.kv.cache_group import CacheGroup
from edgekv.kv.row_table import RowTable
from edgekv.kv.rows import Layout, RowArena
from edgekv.kv.strategies.strategy import Window


class SharedRows:
    """Rows of several sequences side by side in the window of a cache: each sees the columns of its own past alone.

    A sequence joins with copies of its rows, or adopts those that the cache holds. A fork of it shares them, and copies
    nothing. Rows that a graph has computed are kept by copying each once, from where the step has written them.

    The window is that of one step of the cache, which stays open and is never committed. Where attention windows
    differ, the smallest has all columns. Rows that do not fit into the window are in spill memory.

    Attributes:
        cache: the memory of the window.
        windows: of every step.
        table: maps tokens of sequences to rows.
        spill_bytes: bytes allocated in addition to the cache; 0 if all rows fit into its window.
        bytes_joined: bytes copied into the window, of sequences that joined.
        bytes_kept: bytes copied to keep computed rows: one row of all tensors per token.
        bytes_gathered: bytes copied by swapping rows between the window and the spill memory.
    """

    def __init__(self, cache: KVCache, ar: int, *, rows: int = 0) -> None:
        """Open the window, in which no sequence is yet.

        Args:
            cache: has room for a step of the AR-`ar` graph of its largest context.
            ar: tokens per inference of the graph.
            rows: that sequences will keep, beside those that the cache holds; those beyond its window are spilled.

        Raises:
            ContextFullError: the cache has no room.
        """
        self.cache = cache
        self.windows: Sequence[Window] = cache.window(ar)
        placed = [
            (at, group, arena, window)
            for at, (group, arena, window) in enumerate(
                (group, arena, window)
                for group, window in zip(cache.groups, self.windows, strict=True)
                for arena in group.arenas
            )
            if group in cache.row_groups
        ]
        columns = min(window.columns for *_, window in placed)
        spare = columns - max(window.stop - window.first for *_, window in placed)
        # One row more than can be in use, as a temporary row for swaps.
        spill = rows + 1 - spare if rows and rows > spare else 0
        self.table = RowTable(columns, spill)
        self._arenas = [(at, arena, window.past_row) for at, _, arena, window in placed]
        self._spilled: list[Arena] = []
        for _, group, arena, _ in placed if spill else ():
            kinds = tuple(dict.fromkeys(tensor.kind for tensor in arena.tensors))
            self._spilled.append(RowArena(Layout(group.geometry, spill, kinds=kinds)))
        self.spill_bytes = sum(arena.bytes_held for arena in self._spilled)
        self._row_bytes = sum(group.geometry.tensors * group.geometry.row_bytes for group in cache.row_groups)
        self.bytes_joined = self.bytes_kept = self.bytes_gathered = 0

    @property
    def bytes_held(self) -> int:
        """Bytes allocated: the cache and the spill memory."""
        return self.cache.bytes_held + self.spill_bytes

    def adopt(self, sequence: Hashable) -> None:
        """Let the first sequence have the tokens that the cache holds, in layers that all attend to the whole context.

        Raises:
            ValueError: there are other sequences, or layers of several kinds.
        """
        (window,) = self.windows
        self.table.adopt(sequence, range(window.first, window.stop))

    def join(self, sequence: Hashable, cache: KVCache) -> None:
        """Copy the tokens that another cache of the same geometry holds, all of a text, into the window.

        Raises:
            ValueError: it has joined already, or there are too few free columns.
        """
        columns = self.table.join(sequence, cache.length)
        for (group, theirs), (_, own, past_row) in zip(_attending(cache), self._arenas, strict=True):
            rows = np.empty((len(own.tensors), cache.length, group.geometry.width), own.dtype)
            theirs.copy_out(slice(None), group.strategy.held_rows(), rows)
            own.copy_in(slice(None), [past_row + column for column in columns], rows)
            self.bytes_joined += rows.nbytes

    def fork(self, parents: Mapping[Hashable, Hashable]) -> None:
        """Let sequences go on from others, all at once; see `RowTable.fork`."""
        self.table.fork(parents)

    def columns(self, sequence: Hashable) -> Sequence[int]:
        """Prepare a sequence to run; return the columns of its rows, oldest token first."""
        for copy in self.table.gather(sequence):
            for to, row in zip(self._row(copy.dst_row), self._row(copy.src_row), strict=True):
                to[:] = row
            self.bytes_gathered += self._row_bytes
        return self.table.of(sequence)

    def keep(self, sequence: Hashable, new: Sequence[Rows]) -> None:
        """Append a token to a sequence.

        Args:
            sequence: its next token.
            new: `[N, D]` of each of the cache's `arenas`, a row of each tensor.

        Raises:
            ValueError: there is no room.
        """
        place = self._row(self.table.append(sequence))
        for to, (at, *_) in zip(place, self._arenas, strict=True):
            to[:] = new[at]
        self.bytes_kept += self._row_bytes

    def _row(self, row: int) -> list[Rows]:
        """One physical row of all tensors, `[N, D]` in each arena."""
        if row < self.table.columns:
            return [arena.row(past_row + row) for _, arena, past_row in self._arenas]
        return [arena.row(row - self.table.columns) for arena in self._spilled]


def _attending(cache: KVCache) -> list[tuple[CacheGroup, Arena]]:
    """The arenas of the groups with attention."""
    return [(group, arena) for group in cache.row_groups for arena in group.arenas]
