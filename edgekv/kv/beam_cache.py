"""The keys and values of several beams in the cache of one sequence."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.kv.arena import Arena, Rows
from edgekv.kv.beam_table import BeamTable
from edgekv.kv.cache import KVCache
from edgekv.kv.rows import Layout, RowArena


class BeamCache:
    """Beams that share the prompt in a cache and keep their own rows in the free columns of its AR-1 window.

    The graph runs once per beam on the same window; the beam sees the columns `prompt` and its own, `columns`. The
    computed row is then copied once, to its row in the table. Reordering copies nothing.

    The cache itself does not step and contains only the prompt. If the rows of all beams do not fit into the window,
    spill memory is allocated at the start and counted by `bytes_held`.

    Attributes:
        window: of every step.
        prompt: the columns of the prompt.
        position: absolute position of the token that the beams run next.
        table: maps tokens of beams to rows.
        spill_bytes: bytes allocated in addition to the cache; 0 if all rows of the beams fit into its window.
        bytes_kept: bytes copied to keep computed rows: one row of all tensors per beam and step.
        bytes_gathered: bytes copied by swapping rows between the window and the spill memory.
    """

    def __init__(self, cache: KVCache, beams: int, *, kept: int) -> None:
        """Start with beams that contain the prompt.

        Args:
            cache: holds the prompt, and has room for a step of the AR-1 graph.
            beams: number of beams.
            kept: maximum rows per beam besides the prompt: one for each step but the last.

        Raises:
            ContextFullError: the cache has no room.
            ValueError: the context has no room for `kept` rows, or the cache's layers are not all alike.
        """
        (group,) = cache.groups
        geometry = group.geometry
        (self.window,) = cache.window(1)
        self.prompt = range(self.window.first, self.window.stop)
        self.position = cache.position
        self._cache = cache
        past_rows = geometry.past_rows(1)
        self._columns = [*range(self.window.first), *range(self.window.stop, past_rows)]
        self.table = BeamTable(beams, columns=len(self._columns), kept=kept)
        self._arenas = group.arenas
        self._spilled: list[Arena] = []
        if self.table.spill:
            kinds = [{tensor.kind for tensor in arena.tensors} for arena in self._arenas]
            self._spilled = [RowArena(Layout(geometry, self.table.spill, kinds=tuple(each))) for each in kinds]
        self.spill_bytes = sum(arena.bytes_held for arena in self._spilled)
        self._row_bytes = geometry.tensors * geometry.row_bytes
        self.bytes_kept = 0
        self.bytes_gathered = 0

    @property
    def bytes_held(self) -> int:
        """Bytes allocated: the cache and the spill memory."""
        return self._cache.bytes_held + self.spill_bytes

    def columns(self, beam: int) -> list[int]:
        """Prepare a beam to run; return the columns of its own rows, oldest token first."""
        for copy in self.table.gather(beam):
            for to, row in zip(self._row(copy.dst_row), self._row(copy.src_row), strict=True):
                to[:] = row
            self.bytes_gathered += self._row_bytes
        return [self._columns[row] for row in self.table.rows(beam)]

    def keep(self, beam: int) -> None:
        """Keep the row that the graph computed for a beam; the next run would overwrite it."""
        for to, new in zip(self._row(self.table.append(beam)), self._cache.new_rows((self.window,)), strict=True):
            to[:] = new[:, 0]
        self.bytes_kept += self._row_bytes

    def reorder(self, parents: Sequence[int]) -> None:
        """Let beam i continue beam `parents[i]`, one position further."""
        self.table.reorder(parents)
        self.position += 1

    def _row(self, row: int) -> list[Rows]:
        """One physical row of all tensors, `[N, D]` in each arena."""
        if row < self.table.columns:
            return [arena.row(self.window.past_row + self._columns[row]) for arena in self._arenas]
        return [arena.row(row - self.table.columns) for arena in self._spilled]
