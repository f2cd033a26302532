"""A static graph on bound memory: tokens and a cache window in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from numpy.typing import NDArray

from edgekv.bundle import EmbeddingTable, GraphRecord, Manifest
from edgekv.errors import EngineError
from edgekv.kv import KVCache, Window
from edgekv.runtime.adapter import NO_ADAPTER, AdapterMemory
from edgekv.runtime.binding import Binding, aligned_zeros
from edgekv.runtime.bound_part import BoundPart
from edgekv.runtime.inputs import RowView, StepInputs
from edgekv.runtime.rope import RopeTable

_ROW_BLOCK = 64  # other sizes cost time when they are bound


@dataclass(slots=True)
class StepTimes:
    """Sums over steps.

    Attributes:
        steps: steps run.
        run_ns: time within the runtime, ns.
        host_ns: all other time of the steps: inputs, bindings, copies of the cache, ns.
    """

    steps: int = 0
    run_ns: int = 0
    host_ns: int = 0

    def __add__(self, other: StepTimes) -> StepTimes:
        return StepTimes(self.steps + other.steps, self.run_ns + other.run_ns, self.host_ns + other.host_ns)

    def __sub__(self, earlier: StepTimes) -> StepTimes:
        return StepTimes(self.steps - earlier.steps, self.run_ns - earlier.run_ns, self.host_ns - earlier.host_ns)


class StaticGraph:
    """A graph whose inputs and outputs are bound once. A step writes the small inputs and moves the cache's windows.

    Its parts run in order. The output of one part is the input of the next, in memory that both are bound to.

    Attributes:
        record: the graph's entry in the manifest.
        ar: tokens per inference.
        context: S.
        steps: steps run.
        clock: sums over steps, which other graphs may share; whoever moves the cache adds that time.
        row_block: steps read the cache's rows in use, in a multiple of this number; 0 if they read all. It is 1 where
            drafts are verified: then a token is in the same column of all graphs.
        takes_fewer: whether a step has as many rows as tokens, instead of AR.
    """

    def __init__(
        self,
        bindings: Sequence[Binding],
        manifest: Manifest,
        record: GraphRecord,
        cache: KVCache,
        ropes: Mapping[str, RopeTable],
        embeddings: EmbeddingTable | None = None,
        layer_inputs: EmbeddingTable | None = None,
        adapter: AdapterMemory = NO_ADAPTER,
        clock: StepTimes | None = None,
    ) -> None:
        """Bind a loaded graph to a cache.

        Args:
            bindings: of its parts, in order.
            manifest: of the bundle.
            record: the graph's entry in the manifest.
            cache: see `use`.
            ropes: see `rope_tables`.
            embeddings: see `Bundle.embeddings`.
            layer_inputs: see `Bundle.layer_inputs`.
            adapter: see `adapt`; graphs without slots need none.
            clock: counts its steps; None for one of its own.

        Raises:
            BundleError: the graph's inputs or outputs do not match the manifest.
        """
        self.record = record
        self.ar = record.ar
        self.context = record.context
        self.steps = 0
        self.clock = StepTimes() if clock is None else clock
        self.takes_fewer = any(binding.takes_fewer for binding in bindings)
        self._inputs = StepInputs(manifest, record, ropes, embeddings, layer_inputs, takes_fewer=self.takes_fewer)
        interfaces = manifest.interface.parts(record)
        exits = {each.exit.name: aligned_zeros(each.exit.shape, each.exit.dtype) for each in interfaces}
        stop = manifest.model.first_without_cache or manifest.model.layers
        self._parts = [
            BoundPart(
                binding,
                part,
                interface,
                self._inputs.arrays | exits,
                self._inputs.groups,
                manifest.interface.borrowed(part),
                is_needed=part.first_layer < stop,
            )
            for binding, part, interface in zip(bindings, record.parts, interfaces, strict=True)
        ]
        self._logits = exits[interfaces[-1].exit.name][0]
        reads_used_rows = all(part.reads_used_rows for part in self._parts)
        self.row_block = 0 if not reads_used_rows else _ROW_BLOCK if manifest.graph("verify") is None else 1
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

    def window(self, tokens: int, *, reads_all: bool = False) -> tuple[Window, ...]:
        """Open a step of so many tokens in the cache; see `KVCache.window`.

        Args:
            tokens: 1 to AR.
            reads_all: whether the step reads all rows; one with views does.

        Raises:
            ContextFullError: the cache has no room for a step of this graph.
        """
        rows = tokens if self.takes_fewer else self.ar
        return self._cache.window(rows, self.record.context, 0 if reads_all else self.row_block)

    def before_next_run(self, call: Callable[[], None]) -> None:
        """Call something once before the next step overwrites the logits of the last one."""
        self._before_next_run = call

    def run(
        self,
        tokens: Sequence[int],
        windows: Sequence[Window],
        position: int,
        views: Sequence[RowView] | None = None,
        *,
        logits: bool = True,
    ) -> None:
        """Run tokens on open windows of the cache; the caller commits the new rows.

        Args:
            tokens: 1 to AR.
            windows: where the graph reads and writes in each group of the cache.
            position: absolute position of the first one. After `window`, since a policy that evicts tokens there can
                change it.
            views: what each of them is and sees; None if they follow each other.
            logits: whether the logits are needed; without them, the last parts without a cache do not run.

        Raises:
            EngineError: the runtime failed; the cache is as it was before the step.
        """
        started = perf_counter_ns()
        if not 1 <= len(tokens) <= self.ar:
            raise ValueError(f"tokens: got {len(tokens)}; expected 1 to {self.ar}")
        if self._before_next_run is not None:
            call, self._before_next_run = self._before_next_run, None
            call()
        if views is not None:
            self._inputs.write_views(tokens, views, windows)
        else:
            self._inputs.write(tokens, position, windows)
        parts = self._parts if logits else [part for part in self._parts if part.is_needed]
        for part in parts:
            part.bind(windows, len(tokens))
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
        clock = self.clock
        clock.run_ns += perf_counter_ns() - entered
        clock.host_ns += entered - started
        clock.steps += 1
        self.steps += 1
