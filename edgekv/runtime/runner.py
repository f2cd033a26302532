"""The graphs of a bundle over one cache: which of them takes the next tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle, GraphRecord, Role
from edgekv.kv import KVCache, Window
from edgekv.runtime.embedding import open_table
from edgekv.runtime.engine import Engine
from edgekv.runtime.graph import StaticGraph
from edgekv.runtime.rope import rope_tables


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Sums since the runner was made.

    Attributes:
        steps: steps run.
        run_ns: time within the runtime's own run, ns.
        host_ns: all other time of the steps, ns.
    """

    steps: int
    run_ns: int
    host_ns: int

    def __sub__(self, earlier: StepTimes) -> StepTimes:
        return StepTimes(self.steps - earlier.steps, self.run_ns - earlier.run_ns, self.host_ns - earlier.host_ns)


def choose_ar(remaining: int, available: Iterable[int], room: Callable[[int], bool]) -> int:
    """The AR of the next step: the least that takes all remaining tokens, or else the greatest that has room.

    AR-1 if nothing else has room; whether AR-1 has, its step will tell.
    """
    fitting = sorted(ar for ar in available if ar == 1 or room(ar))
    return next((ar for ar in fitting if ar >= remaining), fitting[-1])


def choose_context(columns: int, available: Sequence[int]) -> int:
    """S of the next step's graph: the least that has room for the tokens held and AR more, or else the greatest."""
    return next((context for context in available if context >= columns), available[-1])


_Ladders = dict[int, dict[int, GraphRecord]]  # by AR, then by context, ascending


class Runner:
    """Feeds tokens to the graphs of a bundle. A graph is loaded when it is first needed.

    Each step runs in the least context that has room for it, and the next larger one takes over by itself.

    Attributes:
        cache: the past that all graphs share, until `use` names another one.
    """

    def __init__(self, bundle: Bundle, engine: Engine, cache: KVCache) -> None:
        """Load no graph yet.

        Raises:
            BundleError: the embedding table is not what the manifest promises.
        """
        self.cache = cache
        self._bundle = bundle
        self._engine = engine
        self._graphs: dict[str, StaticGraph] = {}
        self._ladders = _ladders(bundle.manifest.graphs)
        self._ropes = rope_tables(bundle.manifest)
        self._embeddings = open_table(bundle)

    @property
    def times(self) -> StepTimes:
        graphs = self._graphs.values()
        return StepTimes(sum(g.steps for g in graphs), sum(g.run_ns for g in graphs), sum(g.host_ns for g in graphs))

    def use(self, cache: KVCache) -> None:
        """Let all graphs work on another cache; each binds its memory in its next step.

        Raises:
            ValueError: the cache has another geometry, or was not made for all graphs.
        """
        if cache is self.cache:
            return
        if (cache.geometry, cache.ar) != (self.cache.geometry, self.cache.ar):
            found = f"{cache.geometry} with AR {cache.ar}"
            raise ValueError(f"cache: got {found}; expected {self.cache.geometry} with AR {self.cache.ar}")
        self.cache = cache
        for graph in self._graphs.values():
            graph.use(cache)

    def prepare(self, *roles: Role) -> None:
        """Load the graphs of these roles now, those of the least context.

        Raises:
            EngineError: the engine refused a graph.
            BundleError: a graph has not the inputs and outputs that the manifest promises.
        """
        for role in roles:
            for ladder in self._ladders.get(role, {}).values():
                self._graph(next(iter(ladder.values())))

    def feed(self, tokens: Sequence[int]) -> NDArray[Any]:
        """Run tokens and return the logits of the last one as integers `[V]`, valid until the next step."""
        last: NDArray[Any] = self._steps(tokens, "prefill")[-1]
        return last

    def feed_all(self, tokens: Sequence[int]) -> NDArray[Any]:
        """Run tokens and return the logits of each as integers `[T, V]`."""
        rows: list[NDArray[Any]] = []
        self._steps(tokens, "score", lambda logits: rows.append(logits.copy()))
        return np.concatenate(rows)

    def run(self, token: int, position: int, window: Window, columns: Sequence[int]) -> NDArray[Any]:
        """Run one token on an open window of the cache for the largest context; see `StaticGraph.run`.

        The window stays open.

        Returns:
            Its logits as integers `[V]`, valid until the next step.
        """
        record = self._bundle.manifest.graph("decode")
        assert record is not None, "a bundle without a decode graph is not opened"
        graph = self._graph(record)
        graph.run((token,), position, (window,), columns)
        last: NDArray[Any] = graph.logits[-1]
        return last

    def _steps(
        self, tokens: Sequence[int], role: Role, take: Callable[[NDArray[Any]], None] | None = None
    ) -> NDArray[Any]:
        """Run tokens with the graphs of a role and, for single ones, the decode graph.

        Returns:
            The logits of the last step; `take` is given those of each.
        """
        if not tokens:
            raise ValueError("tokens: got none; expected at least one")
        ladders = self._ladders["decode"] | self._ladders.get(role, {})
        self.cache.expect(len(tokens))
        done = 0
        while done < len(tokens):
            ar = choose_ar(len(tokens) - done, ladders, self.cache.room)
            context = choose_context(self.cache.length + ar, [*ladders[ar]])
            graph = self._graph(ladders[ar][context])
            graph.step(tokens[done : done + ar], logits=take is not None or done + ar >= len(tokens))
            if take is not None:
                take(graph.logits)
            done += ar
        return graph.logits

    def _graph(self, record: GraphRecord) -> StaticGraph:
        graph = self._graphs.get(record.name)
        if graph is None:
            bindings = [self._engine.load(self._bundle.part_path(part), part.name) for part in record.parts]
            graph = StaticGraph(bindings, self._bundle.manifest, record, self.cache, self._ropes, self._embeddings)
            self._graphs[record.name] = graph
        return graph


def _ladders(graphs: Iterable[GraphRecord]) -> dict[Role, _Ladders]:
    """The graphs of each role."""
    ladders: dict[Role, _Ladders] = {}
    for graph in sorted(graphs, key=lambda graph: graph.context):
        ladders.setdefault(graph.role, {}).setdefault(graph.ar, {})[graph.context] = graph
    return ladders
