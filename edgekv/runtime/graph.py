"""A static graph on bound memory: tokens and a cache window in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any

from numpy.typing import NDArray

from edgekv.bundle import EmbeddingTable, GraphRecord, Manifest
from edgekv.errors import EngineError
from edgekv.kv import KVCache, Window
from edgekv.runtime.adapter import NO_ADAPTER, AdapterMemory
from edgekv.runtime.binding import Binding, aligned_zeros
from edgekv.runtime.bound_part import BoundPart
from edgekv.runtime.inputs import RowView, StepInputs, tree_views
from edgekv.runtime.rope import RopeTable

_ROW_BLOCK = 64  # a step reads the used rows, rounded up to a multiple: other sizes cost time when they are bound
# Where drafts are verified, it reads exactly these: then a token is in the same column of all graphs.


class StaticGraph:
    """A graph whose inputs and outputs are bound once. A step writes the small inputs and moves the cache's windows.

    Its parts run in order. The output of one part is the input of the next, in memory that both are bound to.

    Attributes:
        record: the graph's entry in the manifest.
        ar: tokens per inference.
        steps: steps run.
        run_ns: time of all steps within the runtime, ns.
        reads_used_rows: whether steps read the cache's rows in use instead of all.
        takes_fewer: whether a step has as many rows as tokens, instead of AR.
        host_ns: all other time of the steps (inputs, bindings, copies of the cache), ns.
    """

    def __init__(
        self,
        bindings: Sequence[Binding],
        manifest: Manifest,
        record: GraphRecord,
        cache: KVCache,
        ropes: Mapping[str, RopeTable],
        embeddings: EmbeddingTable | None = None,
        adapter: AdapterMemory = NO_ADAPTER,
    ) -> None:
        """Bind a loaded graph to a cache.

        Args:
            bindings: of its parts, in order.
            manifest: of the bundle.
            record: the graph's entry in the manifest.
            cache: see `use`.
            ropes: see `rope_tables`.
            embeddings: see `Bundle.embeddings`.
            adapter: see `adapt`; graphs without slots need none.

        Raises:
            BundleError: the graph's inputs or outputs do not match the manifest.
        """
        self.record = record
        self.ar = record.ar
        self.steps = 0
        self.run_ns = 0
        self.host_ns = 0
        self.takes_fewer = any(binding.takes_fewer for binding in bindings)
        self._inputs = StepInputs(manifest, record, ropes, embeddings, takes_fewer=self.takes_fewer)
        interfaces = manifest.interface.parts(record)
        exits = {each.exit.name: aligned_zeros(each.exit.shape, each.exit.dtype) for each in interfaces}
        self._parts = [
            BoundPart(binding, part, interface, self._inputs.arrays | exits, self._inputs.groups)
            for binding, part, interface in zip(bindings, record.parts, interfaces, strict=True)
        ]
        self._logits = exits[interfaces[-1].exit.name][0]
        self.reads_used_rows = all(part.reads_used_rows for part in self._parts)
        self._row_block = _ROW_BLOCK if manifest.graph("verify") is None else 1
        self._before_next_run: Callable[[], None] | None = None
        self.use(cache)
        self.adapt(adapter)

    @property
    def logits(self) -> NDArray[Any]:
        """The logits of the last step that computed them, as integers `[rows, V]`, valid until the next step.

        One row, for the last token; graphs of the roles `score` and `verify` return one for each token of the step.
        """
        rows: NDArray[Any] = self._logits[: self._inputs.filled]
        return rows

    def release(self) -> None:
        """Give memory back to the system that the next step can read again from files."""
        for part in self._parts:
            part.release()

    def use(self, cache: KVCache) -> None:
        """Use another cache of the same geometry from the next step on."""
        self._cache = cache
        for part in self._parts:
            part.use(cache)

    def adapt(self, memory: AdapterMemory) -> None:
        """Read adapters from this memory from the next step on; nothing is compiled or loaded."""
        for part in self._parts:
            part.adapt(memory)
        self._adapter = memory  # keeps the memory alive

    def step(self, tokens: Sequence[int], *, logits: bool = True) -> None:
        """Run 1 to AR tokens and append their keys and values to the cache.

        Args:
            tokens: ids.
            logits: whether the logits are needed; without them a head that is a separate part does not run.

        Raises:
            ContextFullError: the cache has no room for a step of this graph.
            EngineError: the runtime failed; the cache is as it was before the step.
        """
        self.open(tokens, logits=logits)
        started = perf_counter_ns()
        self._cache.commit(len(tokens))
        self.host_ns += perf_counter_ns() - started

    def open(self, tokens: Sequence[int], *, logits: bool = True) -> None:
        """As `step`, without appending anything to the cache: the caller commits as many of the rows as it keeps."""
        started = perf_counter_ns()
        if not 1 <= len(tokens) <= self.ar:
            raise ValueError(f"tokens: got {len(tokens)}; expected 1 to {self.ar}")
        windows = self._cache.window(len(tokens) if self.takes_fewer else self.ar, self.record.context)
        # After `window`: a policy that evicts tokens there can change the position.
        position = self._cache.position
        self.host_ns += perf_counter_ns() - started
        self.run(tokens, position, windows, logits=logits)

    def open_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """As `open`, of tokens that branch.

        Args:
            tokens: 1 to AR.
            parents: row of the token before each, lower than its own; -1 for the last one in the cache.

        Raises:
            ContextFullError: the cache has no room for a step of this graph.
            EngineError: the runtime failed.
        """
        windows = self._cache.window(self.ar, self.record.context)
        self.run_views(tokens, tree_views(parents, self._cache.position), windows)

    def before_next_run(self, call: Callable[[], None]) -> None:
        """Call something once before the next step overwrites the logits of the last one."""
        self._before_next_run = call

    def run(
        self,
        tokens: Sequence[int],
        position: int,
        windows: Sequence[Window],
        *,
        logits: bool = True,
    ) -> None:
        """Run tokens on open windows of the cache; the caller commits the new rows.

        Args:
            tokens: 1 to AR.
            position: absolute position of the first one.
            windows: where the graph reads and writes in each group of the cache.
            logits: see `step`.

        Raises:
            EngineError: the runtime failed.
        """
        started = perf_counter_ns()
        self._end_last_run()
        if self.reads_used_rows:
            windows = [window.narrowed(self._row_block) for window in windows]
        self._inputs.write(tokens, position, windows)
        self._execute(windows, len(tokens), started, logits=logits)

    def run_views(self, tokens: Sequence[int], views: Sequence[RowView], windows: Sequence[Window]) -> None:
        """Run tokens that do not simply follow each other; the caller takes the new rows.

        Args:
            tokens: 1 to AR.
            views: what each of them is and sees.
            windows: where the graph reads and writes in each group of the cache.

        Raises:
            EngineError: the runtime failed.
        """
        started = perf_counter_ns()
        self._end_last_run()
        self._inputs.write_views(tokens, views, windows)
        self._execute(windows, len(tokens), started)

    def _end_last_run(self) -> None:
        if self._before_next_run is not None:
            call, self._before_next_run = self._before_next_run, None
            call()

    def _execute(self, windows: Sequence[Window], tokens: int, started: int, *, logits: bool = True) -> None:
        """Run the parts on their inputs, which have been written since `started`."""
        parts = self._parts if logits else [part for part in self._parts if not part.is_head]
        for part in parts:
            part.bind(windows, tokens)
        entered = perf_counter_ns()
        try:
            for part in parts:
                part.run()
        except Exception as error:  # the runtimes' exceptions have no common base
            raise EngineError(
                f"running {self.record.name}",
                got=" ".join(str(error).split()),
                expected="a step",
                fix="Try another --engine; if it runs there, report this graph.",
            ) from None
        self.run_ns += perf_counter_ns() - entered
        self.host_ns += entered - started
        self.steps += 1
