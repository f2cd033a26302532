"""A static graph on bound memory: tokens and a cache window in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import GraphRecord, Manifest
from edgekv.errors import EngineError
from edgekv.kv import Arena, Group, KVCache, Window
from edgekv.runtime.binding import Binding, aligned_zeros
from edgekv.runtime.inputs import RowView, StepInputs
from edgekv.runtime.rope import RopeTable
from edgekv.spec import GraphInterface, PartRecord, Port

_ROW_BLOCK = 64  # a step reads the used rows, rounded up to a multiple: other sizes cost time when they are bound
# Where drafts are verified, it reads exactly these: then a token is in the same column of all graphs.

_Bind = Callable[[Sequence[str], "np.dtype[Any]", Sequence[int], Sequence[int], int], None]


class StaticGraph:
    """A graph whose inputs and outputs are bound once. A step writes the small inputs and moves the cache's windows.

    Its parts run in order. The output of one part is the input of the next, in memory that both are bound to.

    Attributes:
        record: the graph's entry in the manifest.
        ar: tokens per inference.
        steps: steps run.
        run_ns: time of all steps within the runtime, ns.
        reads_used_rows: whether steps read the cache's rows in use instead of all.
        host_ns: all other time of the steps (inputs, bindings, copies of the cache), ns.
    """

    def __init__(
        self,
        bindings: Sequence[Binding],
        manifest: Manifest,
        record: GraphRecord,
        cache: KVCache,
        ropes: Mapping[str, RopeTable],
        embeddings: NDArray[Any] | None = None,
    ) -> None:
        """Bind a loaded graph to a cache.

        Args:
            bindings: of its parts, in order.
            manifest: of the bundle.
            record: the graph's entry in the manifest.
            cache: see `use`.
            ropes: see `rope_tables`.
            embeddings: see `open_table`.

        Raises:
            BundleError: the graph's inputs or outputs do not match the manifest.
        """
        self.record = record
        self.ar = record.ar
        self.steps = 0
        self.run_ns = 0
        self.host_ns = 0
        self._inputs = StepInputs(manifest, record, ropes, embeddings)
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
            part.use(cache, self.ar)

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
        windows = self._cache.window(self.ar, self.record.context)
        # After `window`: a policy that evicts tokens there can change the position.
        position = self._cache.position
        self.host_ns += perf_counter_ns() - started
        self.run(tokens, position, windows, logits=logits)

    def before_next_run(self, call: Callable[[], None]) -> None:
        """Call something once before the next step overwrites the logits of the last one."""
        self._before_next_run = call

    def run(
        self,
        tokens: Sequence[int],
        position: int,
        windows: Sequence[Window],
        columns: Sequence[int] = (),
        *,
        logits: bool = True,
    ) -> None:
        """Run tokens on open windows of the cache; the caller commits the new rows.

        Args:
            tokens: 1 to AR.
            position: absolute position of the first one.
            windows: where the graph reads and writes in each group of the cache.
            columns: past columns to attend to besides those of the windows.
            logits: see `step`.

        Raises:
            EngineError: the runtime failed.
        """
        started = perf_counter_ns()
        self._end_last_run()
        if self.reads_used_rows and not columns:
            windows = [window.narrowed(self._row_block) for window in windows]
        self._inputs.write(tokens, position, windows, columns)
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


class _ArenaPorts:
    """The ports that one arena of the cache serves, for the layers of a part."""

    __slots__ = ("new_names", "new_shape", "past_names", "tensors")

    def __init__(self, arena: Arena, layers: range, ar: int) -> None:
        held = [index for index, tensor in enumerate(arena.tensors) if tensor.layer in layers]
        self.tensors = slice(held[0], held[-1] + 1)  # an arena holds its tensors layer by layer
        self.past_names = [tensor.past for tensor in arena.tensors[self.tensors]]
        self.new_names = [tensor.new for tensor in arena.tensors[self.tensors]]
        self.new_shape = arena.new_shape(ar)


class _GroupPorts:
    """The ports that one group of the cache serves, and where they are bound."""

    __slots__ = ("arenas", "bound", "group", "index")

    def __init__(self, index: int, group: Group, layers: range, ar: int) -> None:
        self.index = index
        self.group = group
        self.arenas = [_ArenaPorts(arena, layers, ar) for arena in group.arenas]
        self.bound: tuple[int, ...] | None = None

    def bind(self, binding: Binding, window: Window) -> None:
        """Bind the ports to a window, unless they already are."""
        wanted = (self.group.reallocations, window.past_row, window.new_row, window.columns)
        if self.bound == wanted:
            return
        # Read the arenas from the group each time: keeping them would keep outgrown memory alive.
        for ports, arena in zip(self.arenas, self.group.arenas, strict=True):
            dtype, tensors = arena.dtype, ports.tensors
            past, new = arena.past_offset_bytes(window), arena.new_offset_bytes(window)
            binding.inputs(ports.past_names, dtype, arena.past_shape(window.columns), arena.addresses[tensors], past)
            binding.outputs(ports.new_names, dtype, ports.new_shape, arena.new_addresses(window)[tensors], new)
        self.bound = wanted


class BoundPart:
    """A part whose inputs and outputs are bound once. A step rebinds only the cache's windows and a head's row.

    Attributes:
        is_head: whether the part is only a head, which a step can skip if its logits are not needed.
        reads_used_rows: whether windows can have fewer columns than the graph's past rows.
        run: runs the part on the bound memory.
        release: see `Binding`.
    """

    def __init__(
        self,
        binding: Binding,
        record: PartRecord,
        interface: GraphInterface,
        arrays: Mapping[str, NDArray[Any]],
        mask_groups: Mapping[str, int],
    ) -> None:
        """Bind a loaded part to `arrays`, by name; the ports of the cache follow with `use`.

        Args:
            binding: of the part.
            record: the part's entry in the manifest.
            interface: the ports that it must have.
            arrays: the memory of its ports other than the cache's.
            mask_groups: the group of the cache that each mask belongs to.

        Raises:
            BundleError: the part does not have the inputs and outputs of its interface.
        """
        interface.check(binding.interface, record.file)
        self.is_head = not record.layers
        self.reads_used_rows = self.is_head or binding.reads_used_rows
        self.run = binding.run
        self.release = binding.release
        self._layers = record.layers
        self._binding = binding
        self._groups: list[_GroupPorts] = []
        for bind, ports in ((binding.inputs, interface.inputs), (binding.outputs, interface.outputs)):
            for port in ports:
                if port.name in arrays:
                    _bind(bind, port, arrays[port.name])
        self._masks = {port: mask_groups[port.name] for port in interface.inputs if port.name in mask_groups}
        self._mask_columns = {port.name: port.shape[-1] for port in self._masks}
        self._arrays = arrays
        self._entry = interface.entry
        self._hidden = arrays[self._entry.name]
        self._row = 0
        self._reads_one_row = self.is_head and self._entry.shape[2] == 1

    def use(self, cache: KVCache, ar: int) -> None:
        """Use this cache from the next step on."""
        self._groups = [
            _GroupPorts(index, group, self._layers, ar)
            for index, group in enumerate(cache.groups)
            if any(tensor.layer in self._layers for tensor in group.geometry.names())
        ]

    def bind(self, windows: Sequence[Window], tokens: int) -> None:
        """Bind to the windows of a step of `tokens` tokens. A head of one row reads the row of the last token."""
        for group in self._groups:
            group.bind(self._binding, windows[group.index])
        for port, index in self._masks.items():
            columns = windows[index].columns + windows[index].ar
            if self._mask_columns[port.name] != columns:
                self._mask_columns[port.name] = columns
                narrow = replace(port, shape=(*port.shape[:-1], columns))
                _bind(self._binding.inputs, narrow, self._arrays[port.name])
        if self._reads_one_row and self._row != tokens - 1:
            self._row = tokens - 1
            _bind(self._binding.inputs, self._entry, self._hidden, self._row * self._hidden.strides[2])


def _bind(bind: _Bind, port: Port, array: NDArray[Any], offset_bytes: int = 0) -> None:
    bind([port.name], array.dtype, port.shape, [array.ctypes.data], offset_bytes)
