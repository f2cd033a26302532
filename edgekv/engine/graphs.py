"""The graphs of a bundle, and the choice of the graph for the next tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import get_args

from edgekv.bundle import Bundle, GraphRecord, Role
from edgekv.engine.adapters import BoundAdapter
from edgekv.kv import KVCache
from edgekv.runtime import Engine, RowBits, StaticGraph, StepTimes
from edgekv.runtime.adapter import AdapterMemory
from edgekv.runtime.engine import wide_prefill_of
from edgekv.runtime.graph import rope_tables


def choose_ar(remaining: int, available: Iterable[int], room: Callable[[int], bool]) -> int:
    """The AR of the next step: the smallest for all remaining tokens, otherwise the largest that has room.

    AR-1 if no other has room; its step raises ContextFullError if there is none.
    """
    chosen = 1
    for ar in sorted(available):
        if ar == 1 or room(ar):
            chosen = ar
            if ar >= remaining:
                break
    return chosen


def choose_context(columns: int, available: Sequence[int]) -> int:
    """S of the next step's graph: the smallest that has room for the held tokens and AR more, otherwise the largest."""
    return next((context for context in available if context >= columns), available[-1])


_IDLE_STEPS = 16
"""Steps of another graph after which one is idle: reading its pages again takes less time than one step."""
_IDLE_VERIFY_STEPS = 256
"""The same for verify graphs: where drafts are rare, a fifth of their pass would go to reading pages."""

_Ladder = dict[int, dict[int, GraphRecord]]  # by AR, then by context, ascending


class Graphs:
    """The graphs of a bundle on one cache at a time. A graph is loaded when it is first needed.

    Attributes:
        cache: the KV cache that all graphs currently share.
        row_bits: whether graphs of every AR give the same bits.
        clock: of the steps of all graphs.
    """

    def __init__(self, bundle: Bundle, engine: Engine, cache: KVCache) -> None:
        """Load no graph yet.

        Raises:
            BundleError: the embedding table does not match the manifest.
        """
        self.cache = cache
        self.clock = StepTimes()
        self._bundle = bundle
        self._engine = engine
        self.row_bits: RowBits = getattr(engine, "row_bits", "unequal")  # engines of other packages may not say
        self._verifies_anywhere = self.row_bits == "equal"
        if bundle.manifest.model.delta_rule is not None and self._verifies_anywhere:
            self.row_bits = "in-place"  # prompts are computed in another way than single tokens
        self._loaded: dict[str, StaticGraph] = {}
        self._chosen: StaticGraph | None = None
        self._in_a_row = 0
        self._ladders = _ladders(bundle.manifest.graphs)
        wide = [graph for graph in wide_prefill_of(engine, bundle.manifest) if graph.ar in cache.ar]
        if wide:
            self._ladders |= _ladders(wide)
        self._takes_fewer: set[Role] = {graph.role for graph in wide}
        single = self._ladders.get("decode", {})
        self._steps: dict[Role, _Ladder] = {role: single | self._ladders.get(role, {}) for role in get_args(Role)}
        self._ropes = rope_tables(bundle.manifest)
        self._embeddings = bundle.embeddings() if bundle.manifest.host_embeds else None
        self._layer_inputs = bundle.layer_inputs()
        self._no_adapter = self._adapter = AdapterMemory({}, {})

    @property
    def vocab(self) -> int:
        """Number of the logits."""
        return self._bundle.manifest.model.vocab

    @property
    def times(self) -> StepTimes:
        """Sums since the graphs were loaded."""
        return replace(self.clock)

    @property
    def loaded(self) -> list[StaticGraph]:
        """The graphs loaded so far."""
        return list(self._loaded.values())

    @property
    def last_ar(self) -> int:
        """AR of the graph that `choose` chose last; 1 before that."""
        return 1 if self._chosen is None else self._chosen.ar

    @property
    def draft_room(self) -> int:
        """The most tokens that a pass of a verify graph may have now; 0 if it must be a step of another graph.

        The graph must see all tokens that single steps would see: an eviction for many rows comes earlier than one
        for a single row. And it must give the bits of single steps, see `RowBits`.
        """
        cache, verify = self.cache, self._ladders.get("verify", {})
        if not verify or self.row_bits == "unequal":
            return 0
        least = cache.geometry.context
        if self.row_bits == "in-place" and not self._verifies_anywhere:
            if not self._load(next(iter(next(iter(verify.values())).values()))).row_block:
                return 0
            least = min(group.geometry.context for group in cache.groups if not group.geometry.is_state)
        most = max((ar for ar in verify if ar <= least - cache.length), default=0)
        return min(most, cache.step_tokens)

    def use(self, cache: KVCache, adapter: BoundAdapter | None = None) -> None:
        """Switch all graphs to another cache and adapter; each binds their memory, and nothing is loaded.

        Args:
            cache: of the next steps.
            adapter: of the next steps; None for none.

        Raises:
            ValueError: the cache has another geometry, or was not created for these graphs.
        """
        self._adapt(self._no_adapter if adapter is None else adapter.memory)
        if cache is self.cache:
            return
        if (cache.geometry, cache.ar) != (self.cache.geometry, self.cache.ar):
            found = f"{cache.geometry} with AR {cache.ar}"
            raise ValueError(f"cache: got {found}; expected {self.cache.geometry} with AR {self.cache.ar}")
        self.cache = cache
        for graph in self._loaded.values():
            graph.use(cache)

    def _adapt(self, memory: AdapterMemory) -> None:
        if memory is not self._adapter:
            self._adapter = memory
            for graph in self._loaded.values():
                graph.adapt(memory)

    def most(self, role: Role) -> int:
        """The most tokens of a step of this role."""
        return max(self._steps[role])

    def prepare(self, *roles: Role) -> None:
        """Load the graphs of these roles now, those of the smallest context.

        Raises:
            EngineError: the engine refused a graph.
            BundleError: a graph's inputs or outputs do not match the manifest.
        """
        for role in roles:
            for contexts in self._ladders.get(role, {}).values():
                self._load(next(iter(contexts.values())))

    def prepare_prefill(self, tokens: int) -> None:
        """Load the graphs that a prompt of this length runs, for the smallest context.

        Raises:
            EngineError: the engine refused a graph.
            BundleError: a graph's inputs or outputs do not match the manifest.
        """
        ladder = self._steps["prefill"]
        while tokens > 0:
            step = min(tokens, self.cache.step_tokens)
            ar = choose_ar(step, ladder, lambda ar: True)
            self._load(next(iter(ladder[ar].values())))
            tokens -= min(ar, step)

    def choose(self, role: Role, remaining: int) -> StaticGraph:
        """The graph of the next step: of a role, or for single tokens the decode graph.

        Each step runs in the smallest context that has room for it.
        """
        ladder, takes_fewer = self._steps[role], role in self._takes_fewer

        def rows(ar: int) -> int:
            return min(ar, remaining) if takes_fewer else ar

        ar = choose_ar(remaining, ladder, lambda ar: self.cache.room(rows(ar)))
        context = choose_context(self.cache.length + rows(ar), [*ladder[ar]])
        graph = self._load(ladder[ar][context])
        self._release_idle(graph)
        return graph

    def largest_verify(self) -> StaticGraph:
        """The verify graph of the largest AR and context; ValueError if there is none."""
        if not (verify := self._ladders.get("verify")):
            raise ValueError("verify: got no such graph; expected one")
        contexts = verify[max(verify)]
        return self._load(contexts[max(contexts)])

    def largest_decode(self) -> StaticGraph:
        """The decode graph of the largest context."""
        (contexts,) = self._ladders["decode"].values()
        return self._load(contexts[max(contexts)])

    def _release_idle(self, chosen: StaticGraph) -> None:
        """Release the memory of other graphs once, when one has been chosen often enough in a row."""
        self._in_a_row = self._in_a_row + 1 if chosen is self._chosen else 0
        self._chosen = chosen
        if self._in_a_row in (_IDLE_STEPS, _IDLE_VERIFY_STEPS):
            for graph in self._loaded.values():
                is_idle = self._in_a_row == (_IDLE_VERIFY_STEPS if graph.record.role == "verify" else _IDLE_STEPS)
                if is_idle and graph is not chosen:
                    graph.release()

    def _load(self, record: GraphRecord) -> StaticGraph:
        graph = self._loaded.get(record.name)
        if graph is None:
            bindings = [self._engine.load(self._bundle.part_path(part), part.name) for part in record.parts]
            graph = StaticGraph(
                bindings,
                self._bundle.manifest,
                record,
                self.cache,
                self._ropes,
                self._embeddings,
                self._layer_inputs,
                self._adapter,
                self.clock,
            )
            self._loaded[record.name] = graph
        return graph


def _ladders(graphs: Iterable[GraphRecord]) -> dict[Role, _Ladder]:
    ladders: dict[Role, _Ladder] = {}
    for graph in sorted(graphs, key=lambda graph: graph.context):
        ladders.setdefault(graph.role, {}).setdefault(graph.ar, {})[graph.context] = graph
    return ladders
