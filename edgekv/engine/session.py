"""A cache, its tokens, and the graphs that extend it: tokens in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle, GraphRecord, Role
from edgekv.draft import DraftTree, as_tree
from edgekv.engine.adapters import BoundAdapter
from edgekv.engine.hidden_states import HiddenStates
from edgekv.errors import EdgeKVError
from edgekv.kv import KVCache, Requantization, Rows
from edgekv.pictures import PictureEncoder, PictureLayerRows, PictureRows, PositionOffsets
from edgekv.runtime import BatchInvariance, Engine, StaticGraph, StepTimes, tree_rows, whole_texts
from edgekv.runtime.adapter import AdapterMemory
from edgekv.runtime.engine import (
    appending_decode_of,
    divided_by,
    expert_stats_of,
    release_results_of,
    run_by,
    wide_prefill_of,
)
from edgekv.runtime.expert_memory import ExpertStats
from edgekv.runtime.graph import Embeddings, HostTables, rope_tables
from edgekv.spec import FINAL_NORM_RESULT, LAYER_INPUTS_PORT
from quant import Encoding


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
"""Steps of another graph after which one is idle: reading its pages again takes less time than one step.

Prefill graphs of any number of tokens have weights of their own. They are idle at once, and so are others when these
run: their weights and those of a decode step are never in memory together.
"""
_IDLE_VERIFY_STEPS = 256
"""The same for verify graphs: where drafts are rare, a fifth of their pass would go to reading pages."""

_ROWS_OF_A_STEP = 8
"""Rows of a graph that scores which take as long as a single token: of 32, 5 in `fast` and 8 in `emulate`."""

_Ladder = dict[int, dict[int, GraphRecord]]  # by AR, then by context, ascending


class Graphs:
    """The graphs of a bundle on one cache at a time. A graph is loaded when it is first needed.

    Attributes:
        cache: the KV cache that all graphs currently share.
        batch_invariance: whether graphs of every AR give the same bits.
        sees_later_tokens: whether a prompt's token has bits that depend on those behind it in the same step: on the HTP
            products over the tail of a gated delta rule or Mamba-2 do, though the weights of later tokens are 0.
        clock: of the steps of all graphs.
        pictures: the rows of pictures; None if the bundle reads text alone.
    """

    def __init__(self, bundle: Bundle, engine: Engine, cache: KVCache) -> None:
        """Load no graph yet.

        Raises:
            BundleError: the embedding table does not match the manifest.
        """
        self.cache = cache
        self.clock = StepTimes()
        self._bundle = bundle
        self._manifest = run_by(engine, bundle.manifest)
        self._engine = engine
        # Engines of other packages may not say.
        self.batch_invariance: BatchInvariance = getattr(engine, "batch_invariance", "unequal")
        self._verifies_anywhere = self.batch_invariance == "equal"
        self.sees_later_tokens = bundle.manifest.model.delta_rule is not None and self._verifies_anywhere
        if self.sees_later_tokens:
            self.batch_invariance = "in-place"  # prompts are computed in another way than single tokens
        self._loaded: dict[str, StaticGraph] = {}
        self._chosen: StaticGraph | None = None
        self._in_a_row = 0
        self._ladders = _ladders(bundle.manifest.graphs)
        wide = [graph for graph in wide_prefill_of(engine, bundle.manifest) if graph.ar in cache.ar]
        if wide:
            self._ladders |= _ladders(wide)
        if cache.appends and (appending := appending_decode_of(engine, bundle.manifest)):
            self._ladders["decode"] = self._ladders["decode"] | _ladders(appending)["decode"]
        self._takes_fewer: set[Role] = {graph.role for graph in wide}
        single = self._ladders.get("decode", {})
        self._steps: dict[Role, _Ladder] = {role: single | self._ladders.get(role, {}) for role in get_args(Role)}
        self._ropes = rope_tables(bundle.manifest)
        self._embeddings: Embeddings | None = bundle.embeddings() if bundle.manifest.host_embeds else None
        self.pictures: PictureRows | None = None
        if bundle.manifest.vision is not None:
            self._embeddings = self.pictures = PictureRows(bundle.embeddings(), PictureEncoder(bundle, engine))
        self._layer_inputs: Embeddings | None
        self._layer_inputs = table = bundle.layer_inputs()
        if self.pictures is not None and (width := bundle.manifest.model.gathered_width):
            encoding = bundle.manifest.encodings[LAYER_INPUTS_PORT]
            self._layer_inputs = PictureLayerRows(self.pictures, width, encoding, table)
        self._no_adapter = self._adapter = AdapterMemory({}, {})

    def close(self) -> None:
        """Free the graphs, that of the vision encoder too, and let the cache go. Nothing is run afterwards."""
        self._loaded.clear()
        self._chosen = self._embeddings = None
        if self.pictures is not None:
            self.pictures.encoder.close()
        del self.cache

    @property
    def has_whole_pictures(self) -> bool:
        """Whether a step has all rows of a picture or none."""
        return self._whole is not None

    @property
    def _whole(self) -> Callable[[Sequence[int]], list[slice]] | None:
        """See `HostTables.whole`."""
        rows = self.pictures
        return rows.whole if rows is not None and self._manifest.model.whole_pictures else None

    @property
    def _positions(self) -> Callable[[Sequence[int]], NDArray[np.int64] | None] | None:
        """See `HostTables.positions`."""
        rows = self.pictures
        return rows.positions if rows is not None and self._manifest.model.picture_axes else None

    def cut(self, tokens: Sequence[int], end: int) -> int:
        """The last place among tokens, at or before `end`, where a step may end; see `PictureRows.cut`."""
        rows = self.pictures
        return rows.cut(tokens, end) if rows is not None and self._manifest.model.whole_pictures else end

    def stable_cut(self, tokens: Sequence[int], end: int, window: int) -> int:
        """The same where steps end at multiples of a window, or at the ends of a picture that has one within it."""
        multiple = end // window * window
        first = self.cut(tokens, multiple)
        return first if first == multiple or (last := self._tile_end(tokens, first)) > end else last

    def step_tokens(self, tokens: Sequence[int], done: int, most: int) -> int:
        """How many tokens behind the first `done` a step has: `most`, fewer so that it does not cut a picture, or more
        if it begins with that.
        """
        limit = min(done + most, len(tokens))
        end = self.cut(tokens, limit)
        return (self._tile_end(tokens, done) if end <= done < limit else end) - done

    def _tile_end(self, tokens: Sequence[int], at: int) -> int:
        assert self.pictures is not None, "a row of a picture"
        return self.pictures.tile_end(tokens, at)

    def position_offsets(self) -> PositionOffsets | None:
        """What counts the positions of a text; None where they are numbers of tokens."""
        rows = self.pictures
        return PositionOffsets(rows.place) if rows is not None and self._manifest.model.picture_axes else None

    @property
    def vocab(self) -> int:
        """Number of the logits."""
        return self._bundle.manifest.model.result_width

    @property
    def scoring_role(self) -> Role:
        """The role of the graphs that give what follows every token of a text.

        Embedders that pool all tokens have verify graphs for it, which are compiled for chips; `score` is not.
        """
        return "score" if self._bundle.manifest.task is None or "verify" not in self._ladders else "verify"

    @property
    def hidden_encoding(self) -> Encoding:
        """The encoding of the last hidden states that graphs give."""
        return self._bundle.manifest.encodings[FINAL_NORM_RESULT]

    @property
    def times(self) -> StepTimes:
        """Sums since the graphs were loaded."""
        return replace(self.clock)

    @property
    def expert_stats(self) -> ExpertStats | None:
        """See `expert_stats_of`."""
        return expert_stats_of(self._engine)

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
        for a single row. And it must give the bits of single steps, see `BatchInvariance`.
        """
        cache, verify = self.cache, self._ladders.get("verify", {})
        if not verify or self.batch_invariance == "unequal":
            return 0
        least = cache.geometry.context
        if self.batch_invariance == "in-place" and not self._verifies_anywhere:
            if not self._load(next(iter(next(iter(verify.values())).values()))).row_block:
                return 0
            least = min(group.geometry.window for group in cache.row_groups)
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
            got = f"{cache.geometry} with AR {cache.ar}"
            raise ValueError(f"cache: got {got}; expected {self.cache.geometry} with AR {self.cache.ar}")
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

    def prepare_prompt(self, role: Role, tokens: int) -> None:
        """Load the graphs that a prompt of this length runs, for the smallest context; single tokens run `decode`.

        Raises:
            EngineError: the engine refused a graph.
            BundleError: a graph's inputs or outputs do not match the manifest.
        """
        ladder = self._steps[role]
        while tokens > 0:
            step = min(tokens, self.cache.step_tokens)
            ar = self._choose_ar(role, step, lambda ar: True)
            self._load(next(iter(ladder[ar].values())))
            tokens -= min(ar, step)

    def choose(self, role: Role, remaining: int) -> StaticGraph:
        """The graph of the next step: of a role, or for single tokens the decode graph.

        Each step runs in the smallest context that has room for it.
        """
        ladder, takes_fewer = self._steps[role], role in self._takes_fewer

        def rows(ar: int) -> int:
            return min(ar, remaining) if takes_fewer else ar

        ar = self._choose_ar(role, remaining, lambda ar: self.cache.room(rows(ar)))
        context = choose_context(self.cache.length + rows(ar), [*ladder[ar]])
        graph = self._load(ladder[ar][context])
        self._release_idle(graph)
        return graph

    def _choose_ar(self, role: Role, remaining: int, room: Callable[[int], bool]) -> int:
        """The AR of the next step. A few tokens are scored one by one: a graph that scores computes all its rows."""
        ar = choose_ar(remaining, self._steps[role], room)
        return 1 if role == "score" and remaining <= ar // _ROWS_OF_A_STEP else ar

    @property
    def reads_whole_texts(self) -> bool:
        """Whether tokens attend to both sides, so that a text is run as a whole, without a cache."""
        return self._manifest.model.bidirectional

    def shortest(self, tokens: int) -> StaticGraph:
        """The shortest graph with room for whole texts of this number of tokens in all.

        Raises:
            EngineError: the engine refused it.
        """
        ar = choose_ar(tokens, self._ladders["verify"], lambda ar: True)
        return self._load(self._ladders["verify"][ar][ar])

    @property
    def branch_rows(self) -> int:
        """The most tokens of texts that a pass runs beside each other; 0 if layers mix the tokens of all rows."""
        has_rule = self._manifest.model.delta_rule is not None
        return 0 if has_rule else max(self._ladders.get("verify", ()), default=0)

    @property
    def has_verify(self) -> bool:
        """Whether there are verify graphs."""
        return "verify" in self._ladders

    def largest_verify(self) -> StaticGraph:
        """The verify graph of the largest AR and context; ValueError if there is none."""
        if not (verify := self._ladders.get("verify")):
            raise ValueError("verify: got no such graph; expected one")
        contexts = verify[max(verify)]
        return self._load(contexts[max(contexts)])

    def largest_decode(self) -> StaticGraph:
        """The decode graph of the largest context, whose row says what it sees: one that appends sees all."""
        (contexts,) = _ladders(self._bundle.manifest.graphs)["decode"].values()
        return self._load(contexts[max(contexts)])

    def _release_idle(self, chosen: StaticGraph) -> None:
        """Release the memory of other graphs once, when one has been chosen often enough in a row."""
        ends_prompt = self._chosen is not None and self._chosen.takes_fewer and not chosen.takes_fewer
        self._in_a_row = self._in_a_row + 1 if chosen is self._chosen else 0
        self._chosen = chosen
        if self._in_a_row not in (0, _IDLE_STEPS, _IDLE_VERIFY_STEPS):
            return
        for graph in self._loaded.values():
            if graph is not chosen and self._in_a_row == _idle_steps(graph, chosen):
                graph.release()
        if ends_prompt:
            release_results_of(self._engine)

    def _load(self, record: GraphRecord) -> StaticGraph:
        graph = self._loaded.get(record.name)
        if graph is None:
            as_run, experts = divided_by(self._engine, record) or (record, None)
            bindings = [self._engine.load(self._bundle.part_path(part), part.name) for part in as_run.parts]
            graph = StaticGraph(
                bindings,
                self._manifest,
                as_run,
                self.cache,
                HostTables(self._ropes, self._embeddings, self._layer_inputs, self._positions, self._whole),
                self._adapter,
                self.clock,
            )
            if experts is not None:
                graph.route(experts)
            self._loaded[record.name] = graph
        return graph


def _idle_steps(graph: StaticGraph, chosen: StaticGraph) -> int:
    """Steps of a chosen graph after which another one is idle."""
    if graph.record.role == "verify":
        return _IDLE_VERIFY_STEPS
    return 0 if graph.takes_fewer or chosen.takes_fewer else _IDLE_STEPS


def _ladders(graphs: Iterable[GraphRecord]) -> dict[Role, _Ladder]:
    ladders: dict[Role, _Ladder] = {}
    for graph in sorted(graphs, key=lambda graph: graph.context):
        ladders.setdefault(graph.role, {}).setdefault(graph.ar, {})[graph.context] = graph
    return ladders


@dataclass(slots=True)
class CacheUse:
    """What a call did with its cache.

    Attributes:
        reused_tokens: prompt tokens that were not run: already in the sequence's cache, or restored.
        restored_tokens: the part of them that was copied from the prefix cache.
        computed_tokens: tokens run through the graphs, including those computed again.
        evicted_tokens: tokens that a context policy dropped.
        bytes_held: bytes allocated for the cache that was used last.
        bytes_peak: maximum of `bytes_held` since that cache was created.
        reallocations: how often the memory of a layer was replaced by a larger one.
        bytes_copied: bytes that caches copied.
        requantization: rounding error of re-rotated keys in the cache of the last step, since its creation; None if the
            policy moves no keys, and before the first token.
    """

    reused_tokens: int = 0
    restored_tokens: int = 0
    computed_tokens: int = 0
    evicted_tokens: int = 0
    bytes_held: int = 0
    bytes_peak: int = 0
    reallocations: int = 0
    bytes_copied: int = 0
    requantization: Requantization | None = None


class Writer(Protocol):
    """A call that extends a session.

    Attributes:
        session: that it extends; None once it is freed.
    """

    session: Session | None


class Session:
    """A cache, its tokens, and the graphs that extend it. Not thread-safe.

    Attributes:
        cache: the memory.
        tokens: the tokens run so far, oldest first; `len(tokens)` is the position of the next one. With a sliding
            window they include evicted ones.
        writer: the call that extends it; it can continue without comparing tokens.
        adapter: the adapter that its rows were computed with, and the next ones will be; None for none.
        window: prompts are run in steps that end at multiples of this number of tokens; 0 if steps may end anywhere.
        hidden: the last hidden states of its newest tokens, if its graphs give some, for drafters.
    """

    def __init__(self, cache: KVCache, graphs: Graphs, window: int = 0) -> None:
        """Start with an empty cache, which holds the sink if the bundle has one.

        Args:
            cache: the memory.
            graphs: extend it.
            window: see the class.
        """
        self.cache = cache
        self.window = window
        self.tokens: list[int] = self._first
        self._stable = len(self.tokens)
        self.writer: Writer | None = None
        self._use: CacheUse | None = None
        self._counted = cache.stats
        self.adapter: BoundAdapter | None = None
        self._own_sink = cache.sink
        self._graphs = graphs
        self._pass: DraftPass | None = None
        self.hidden = HiddenStates(cache.geometry.context)
        self._offsets = graphs.position_offsets()

    @property
    def position(self) -> int:
        """The position of the next token, which rows of pictures may have moved; see `KVCache.position` for its key."""
        return self.cache.position + self._offset

    def _cut_offsets(self, tokens: int) -> None:
        if self._offsets is not None:
            self._offsets.cut(tokens)

    @property
    def _offset(self) -> int:
        return 0 if self._offsets is None else self._offsets.of(self.tokens)

    @property
    def bytes_held(self) -> int:
        """Bytes allocated for the cache and hidden states."""
        return self.cache.bytes_held + self.hidden.bytes_held

    @property
    def is_empty(self) -> bool:
        """Whether no token but the sink's was run."""
        return self.tokens == self._first

    def adapt(self, adapter: BoundAdapter | None) -> None:
        """Use an adapter, or none, from now on. What was computed with another is dropped."""
        if self.adapter is adapter:
            return
        self.adapter = adapter
        self.cache.sink = self._own_sink if adapter is None else adapter.sink
        self.reset()

    def feed(
        self,
        tokens: Sequence[int],
        role: Role = "prefill",
        take: Callable[[NDArray[Any]], None] | None = None,
        *,
        logits: bool = True,
    ) -> NDArray[Any]:
        """Run the next tokens.

        Args:
            tokens: at least one; none if the cache holds only the sink, whose logits are known.
            role: of the graphs that run several tokens; the decode graph runs single ones.
            take: called with the logits of each step, `[rows, V]`.
            logits: whether those of the last token are needed.

        Returns:
            The logits of the last token as integers `[V]`, valid until the next step; those of an earlier one, if they
            are not needed.

        Raises:
            ContextFullError: the context has no room.
            EngineError: the runtime failed.
        """
        if not tokens:
            return self._sink_logits()
        cache = self.cache
        self.settle()
        self._graphs.use(cache, self.adapter)
        cache.expect(len(tokens))
        done = 0
        while done < len(tokens):
            most = min(len(tokens) - done, cache.step_tokens)
            if self.window and role == "prefill":
                most = min(most, self.window - len(self.tokens) % self.window)
            whole = self._graphs.step_tokens(tokens, done, most)
            graph = self._graphs.choose(role, whole)
            step = tokens[done : done + self._graphs.step_tokens(tokens, done, min(graph.ar, whole))]
            if len(step) > graph.ar:
                raise cache.refusal(len(step))
            done += len(step)
            try:
                began = perf_counter_ns()
                windows = cache.window(len(step) if graph.takes_fewer else graph.ar, graph.context, graph.row_block)
                if graph.appends:
                    windows = cache.append_in_place()
                opened = perf_counter_ns()
                graph.run(step, windows, self.position, logits=take is not None or (logits and done == len(tokens)))
                ran = perf_counter_ns()
                cache.commit(len(step))
                graph.clock.host_ns += opened - began + perf_counter_ns() - ran
                self._keep_hidden(len(self.tokens), graph.hidden)
                self._ran(step, role, is_cut=len(step) == whole != most)
            except EdgeKVError:
                raise  # the cache is unchanged by the failed step
            except BaseException:  # such as Ctrl-C
                self._finish_or_drop(step)
                raise
            if take is not None:
                take(graph.logits)
        last: NDArray[Any] = graph.logits[-1]
        return last

    @property
    def last_hidden(self) -> NDArray[Any] | None:
        """The last hidden state behind the tokens, as integers `[H]`; None if their last pass gave none."""
        states, last = self.hidden, len(self.tokens) - 1
        return states.rows(last, last + 1)[0] if states.first <= last < states.stop else None

    @property
    def hidden_encoding(self) -> Encoding:
        """The encoding of `last_hidden`."""
        return self._graphs.hidden_encoding

    def _keep_hidden(self, position: int, rows: NDArray[Any] | None) -> None:
        """Keep rows for drafters, those of tokens from a position on: the next step would overwrite them."""
        if rows is not None:
            self.hidden.write(position, rows)

    @property
    def draft_room(self) -> int:
        """The most tokens that `verify` takes now; 0 if it cannot run."""
        self.settle()
        self._graphs.use(self.cache, self.adapter)
        return self._graphs.draft_room

    def verify(self, tokens: Sequence[int], drafts: DraftTree | Sequence[int]) -> NDArray[Any]:
        """Run the next tokens, and behind them drafts, which become part of the sequence with `take`.

        Args:
            tokens: at least one.
            drafts: with the tokens at most `draft_room`.

        Returns:
            The logits of the last of `tokens` as integers `[V]`, valid until the next step.

        Raises:
            EngineError: the runtime failed.
        """
        rows = len(tokens) + len(drafts)
        if not tokens or rows > self.draft_room:
            raise ValueError(f"verify: got {len(tokens)} tokens and {len(drafts)} drafts; expected 1 to draft_room")
        self._pass = DraftPass(self._graphs.choose("verify", rows), self.cache, tokens, as_tree(drafts), self._offset)
        return self._pass.logits

    def branch(self, texts: Sequence[Sequence[int]]) -> NDArray[Any]:
        """Run texts that each follow the tokens by itself, in one pass; none of them becomes part of the sequence.

        Args:
            texts: none empty, together at most `Graphs.branch_rows` tokens.

        Returns:
            The logits after each of their tokens as integers `[tokens, V]`, valid until the next step.

        Raises:
            ContextFullError: the context has no room.
            EngineError: the runtime failed.
        """
        self.settle()
        self._graphs.use(self.cache, self.adapter)
        tokens = [token for text in texts for token in text]
        if self._graphs.reads_whole_texts:
            graph = self._graphs.shortest(len(tokens))
            graph.run_rows(whole_texts(texts), graph.without_past())
            return graph.logits
        parents = list[int]()
        for text in texts:
            parents += [-1, *range(len(parents), len(parents) + len(text) - 1)]
        self.cache.expect(len(tokens))
        graph = self._graphs.choose("verify", len(tokens))
        windows = graph.window(len(tokens))
        graph.run_rows(tree_rows(tokens, parents, self.position), windows)
        self.cache.commit(0)
        return graph.logits

    def take(self, tokens: Sequence[int]) -> int:
        """The text continues with these tokens: return how many of them the last pass has run as drafts."""
        return 0 if self._pass is None else self._pass.take(tokens)

    def has_run(self, tokens: Sequence[int]) -> bool:
        """Whether the last pass has run exactly these next tokens as drafts."""
        return self._pass is not None and self._pass.has(tokens)

    def append(self, token: int, rows: Sequence[Rows]) -> None:
        """Append a token whose keys, values and states were computed in another cache's memory.

        Args:
            token: its id.
            rows: `[N, D]` of each of the cache's `arenas`, a row of each tensor.

        Raises:
            ContextFullError: there is no room.
        """
        self.settle()
        self.cache.append(rows)
        self.tokens.append(token)

    @property
    def pass_logits(self) -> NDArray[Any]:
        """The logits of the last token of the sequence, valid until the next step; ValueError without an open pass."""
        if self._pass is None:
            raise ValueError("pass_logits: got no open pass; expected one of `verify`")
        return self._pass.logits

    def settle(self) -> None:
        """Close the pass of `verify`, if one is open: append the rows of taken tokens to the cache, drop the others."""
        if self._pass is None:
            return
        done, self._pass = self._pass, None
        try:
            self.cache.commit(done.rows)
            self._keep_hidden(len(self.tokens), done.hidden)
            self.tokens += done.tokens
        except BaseException:  # such as Ctrl-C
            self._finish_or_drop(done.tokens)
            raise

    def score(self, tokens: Sequence[int]) -> NDArray[Any]:
        """Run tokens from an empty cache and return the logits of each as integers `[T, V]`.

        Args:
            tokens: they begin with the sink, if the bundle has one.

        Raises:
            ContextFullError: the context has no room.
            EngineError: the runtime failed.
        """
        self.reset()
        rows: list[NDArray[Any]] = [] if self.cache.sink is None else [self.cache.sink.logits]
        if new := tokens[len(self.tokens) :]:
            self.feed(new, "score", lambda logits: rows.append(logits.copy()))
        return np.concatenate(rows)

    @property
    def stable_tokens(self) -> int:
        """How many of the first tokens another text keeps when it begins with them.

        With a `window` those of whole windows, or up to the ends of a picture that one would cut: rows that an empty
        cache would get for the same prompt, to the bit.
        """
        return self._stable if self.window else len(self.tokens)

    def reset(self) -> None:
        """Hold nothing but the sink."""
        self._pass = None
        self.hidden.rewind(0)
        self._cut_offsets(0)
        self.cache.reset()
        self.tokens = self._first
        self._stable = len(self.tokens)
        self.writer = None

    def reuse(self, tokens: list[int], *, logits: bool = True) -> int:
        """Keep the longest common prefix with a sequence of tokens, of the stable ones, and return its length.

        At least the last token is left to be run if its `logits` are needed; those of the sink are known. A cache
        that has evicted tokens can be extended but not rewound: it is reset unless the sequence continues it.
        """
        if self.cache.dirty:
            self.reset()
        self.settle()
        first = len(self._first)
        if self.cache.tokens_seen != len(self.tokens):
            self.reset()  # the cache was used without this session, or a change of it was interrupted
        common = min(common_tokens(self.tokens, tokens), max(len(tokens) - logits, first))
        if self.window and common < self._stable:
            common = max(first, self._graphs.stable_cut(self.tokens, common, self.window))
        elif self.window:
            common = max(first, self._stable)
        surplus = len(self.tokens) - common
        if surplus:
            common = self.cache.rewind_to(common)
            self.hidden.rewind(common)
            self._cut_offsets(common)
            del self.tokens[common:]
            self._stable = min(self._stable, common)
            if common == first:
                self.writer = None
        return common

    def adopt(self, tokens: Sequence[int], stable_tokens: int = 0) -> None:
        """Record that the cache now contains these tokens, so many of them stable."""
        self._pass = None
        self.hidden.rewind(0)
        self._cut_offsets(0)
        self.tokens = list(tokens)
        self._stable = stable_tokens
        self.writer = None

    def lend(self, writer: Writer, use: CacheUse) -> None:
        """Let a call extend it from now on; `count` adds what the cache does for it to its record."""
        self.count()
        self.writer, self._use = writer, use
        writer.session = self

    def count(self) -> None:
        """Count what the cache has done since the last call of this, for the call that extends it."""
        now, before, use = self.cache.stats, self._counted, self._use
        self._counted = now
        if use is not None:
            use.bytes_held = now.bytes_held
            use.bytes_peak = now.peak_bytes
            use.reallocations += now.reallocations - before.reallocations
            use.bytes_copied += now.bytes_copied - before.bytes_copied
            use.evicted_tokens += now.evicted - before.evicted
            use.requantization = now.requantization

    def yield_to(self, other: Session) -> None:
        """Switch the graphs to another session's cache, so that this one's memory can be freed."""
        self.count()
        if self.writer is not None and self.writer.session is self:
            self.writer.session = None
        if self._graphs.cache is self.cache:
            self._graphs.use(other.cache, other.adapter)

    def _ran(self, step: Sequence[int], role: Role, *, is_cut: bool) -> None:
        """Note a step, which may be a whole window of a prompt, or end where a picture would be cut."""
        start = len(self.tokens)
        self.tokens += step
        is_whole = self.window and role == "prefill" and (is_cut or len(self.tokens) % self.window == 0)
        if is_whole and start == self._stable:
            self._stable = len(self.tokens)

    @property
    def _first(self) -> list[int]:
        """The tokens of an empty cache."""
        return [] if self.cache.sink is None else [*self.cache.sink.tokens]

    def _sink_logits(self) -> NDArray[Any]:
        if self.cache.sink is None or not self.is_empty:
            raise ValueError("tokens: got none; expected at least one")
        last: NDArray[Any] = self.cache.sink.logits[-1]
        return last

    def _finish_or_drop(self, step: Sequence[int]) -> None:
        """After an interruption: append the tokens of a committed step; reset after half a change of the cache."""
        if self.cache.dirty:
            self.reset()
        elif self.cache.tokens_seen == len(self.tokens) + len(step):
            self.tokens += step


class DraftPass:
    """The open step of a verify graph: rows of known tokens, then of drafts.

    A row counts once its token is part of the text. Only then may it be committed, so that a generation that ends in
    the middle of a pass leaves the cache as single steps would have.

    Attributes:
        rows: those that count, ascending: the known ones, then a path in the tree of drafts.
        tokens: of these rows.
    """

    def __init__(
        self, graph: StaticGraph, cache: KVCache, known: Sequence[int], drafts: DraftTree, offset: int = 0
    ) -> None:
        """Run the rows.

        Args:
            graph: verifies them.
            cache: that it is bound to; no step of it is open.
            known: tokens, at least one.
            drafts: what may follow them.
            offset: of the position of the first of them; see `PositionOffsets`.
        """
        self.rows = list(range(len(known)))
        self.tokens = list(known)
        self._known = len(known)
        self._drafts = drafts
        self._node = -1
        rows = (*known, *drafts.tokens)
        windows, position = graph.window(len(rows), reads_all=not drafts.is_chain), cache.position + offset
        if drafts.is_chain:
            graph.run(rows, windows, position)
        else:
            parents = (*range(-1, len(known) - 1), *(len(known) + parent for parent in drafts.parents))
            graph.run_rows(tree_rows(rows, parents, position), windows)
        self._logits, self._hidden = graph.logits, graph.hidden
        graph.before_next_run(self._keep_logits)

    @property
    def logits(self) -> NDArray[Any]:
        """Of the last row that counts, as integers `[V]`."""
        row: NDArray[Any] = self._logits[self.rows[-1]]
        return row

    @property
    def hidden(self) -> NDArray[Any] | None:
        """The last hidden states of the rows that count, `[rows, H]`; None if there are none."""
        return None if self._hidden is None else self._hidden[self.rows]

    def has(self, tokens: Sequence[int]) -> bool:
        """Whether the next rows have drafts of exactly these tokens."""
        return len(self._drafts.path(tokens, self._node)) == len(tokens)

    def take(self, tokens: Sequence[int]) -> int:
        """Count the next rows as far as they have drafts of these tokens; return how many."""
        path = self._drafts.path(tokens, self._node)
        self._node = path[-1] if path else self._node
        self.rows += [self._known + node for node in path]
        self.tokens += tokens[: len(path)]
        return len(path)

    def _keep_logits(self) -> None:
        """Another step is about to overwrite the logits."""
        self._logits = self._logits.copy()
        self._hidden = None if self._hidden is None else self._hidden.copy()


def common_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix.

    Pieces are compared as wholes: larger ones as long as they are the same, smaller ones where the texts differ.
    """
    same, end, size = 0, min(len(first), len(second)), 32
    while same < end:
        to = min(same + size, end)
        if list(first[same:to]) == list(second[same:to]):
            same, size = to, 2 * size
        else:
            end, size = to - 1, max(1, size // 2)
    return same
