"""Rows of several sequences, run in the window of one cache: texts that share passes, or beams of one text."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from time import perf_counter_ns
from typing import Any

from numpy.typing import NDArray

from edgekv.engine.adapters import BoundAdapter
from edgekv.engine.session import Graphs
from edgekv.kv import KVCache, Rows, SharedRows
from edgekv.runtime import Row, StaticGraph


class SequenceRows:
    """Runs the next tokens of sequences that share a window, several in a pass: a row for each.

    Attributes:
        shared: their keys and values.
        most: sequences of a pass: 1 if not all rows fit into the window.
        passes: passes run.
        rows: tokens that they brought.
    """

    def __init__(self, graphs: Graphs, graph: StaticGraph, cache: KVCache, *, rows: int = 0) -> None:
        """Open the window; no sequence is in it.

        Args:
            graphs: of the model.
            graph: one of them, of the largest context.
            cache: memory of the window, of which no other step is run meanwhile.
            rows: that sequences will keep, beside those that the cache holds; see `SharedRows`.

        Raises:
            ContextFullError: the cache has no room.
        """
        self.shared = SharedRows(cache, graph.ar, rows=rows)
        self.most = 1 if self.shared.table.spill else graph.ar
        self.passes = self.rows = 0
        self._graphs = graphs
        self._graph = graph

    def run(
        self,
        sequences: Sequence[Hashable],
        tokens: Sequence[int],
        adapter: BoundAdapter | None,
        states: Sequence[NDArray[Any] | None] = (),
        offsets: Sequence[int] = (),
    ) -> NDArray[Any]:
        """Run a token of each of at most `most` sequences, in one pass; `keep` those that go on.

        Args:
            sequences: each once.
            tokens: ids.
            adapter: of all; None for none.
            states: of each, `[N, K-1, H]`, where layers have some.
            offsets: of the positions of each, see `PositionOffsets`; none if there are no pictures.

        Returns:
            The logits after each token as integers `[sequences, V]`, valid until the next step.

        Raises:
            EngineError: the runtime failed; the sequences have not changed.
        """
        began, shared, graph = perf_counter_ns(), self.shared, self._graph
        self._graphs.use(shared.cache, adapter)
        rows = []
        for at, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            columns = shared.columns(sequence)
            position = len(columns) + (offsets[at] if offsets else 0)
            rows.append(Row(token, position, columns, (at,), states[at] if states else None))
        graph.clock.host_ns += perf_counter_ns() - began
        graph.run_rows(rows, shared.windows)
        self.passes += 1
        self.rows += len(rows)
        return graph.logits

    def new(self, at: int) -> list[Rows]:
        """The new row of a sequence of the last pass, `[N, D]` in each arena of the cache; the next overwrites it."""
        return self.shared.cache.new_row(self.shared.windows, at)

    def keep(self, at: int, sequence: Hashable) -> None:
        """Append the token of a sequence of the last pass, by its place there.

        Raises:
            ValueError: there is no room.
        """
        began = perf_counter_ns()
        self.shared.keep(sequence, self.new(at))
        self._graph.clock.host_ns += perf_counter_ns() - began
