"""One static graph on bound memory, stepping through a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import Any

from numpy.typing import NDArray

from edgekv.bundle import GraphRecord, Manifest
from edgekv.engine.binding import Binding, aligned_zeros
from edgekv.engine.inputs import StepInputs
from edgekv.engine.rope import RopeTable
from edgekv.engine.signature import Signature
from edgekv.errors import EngineError
from edgekv.kv import Group, KVCache, Store, Window


class _Ends:
    """The graph inputs and outputs that one store of the cache serves."""

    __slots__ = ("new_names", "new_shape", "past_names", "past_shape")

    def __init__(self, store: Store, ar: int, columns: int) -> None:
        self.past_names = [tensor.past for tensor in store.tensors]
        self.new_names = [tensor.new for tensor in store.tensors]
        self.past_shape = store.past_shape(columns)
        self.new_shape = store.new_shape(ar)


class _GroupEnds:
    """Those of one group of layers, and where they are bound."""

    __slots__ = ("bound", "ends", "group")

    def __init__(self, group: Group, ar: int, context: int) -> None:
        columns = group.geometry.past_rows(ar, context)
        self.group = group
        self.ends = [_Ends(store, ar, columns) for store in group.stores]
        self.bound: tuple[int, int, int] | None = None

    def bind(self, binding: Binding, window: Window) -> None:
        wanted = (self.group.reallocations, window.past_row, window.new_row)
        if self.bound == wanted:
            return
        # The group is asked anew: a graph that runs no more must not keep outgrown memory alive.
        for each, store in zip(self.ends, self.group.stores, strict=True):
            dtype = store.dtype
            past, new = store.past_offset_bytes(window), store.new_offset_bytes(window)
            binding.inputs(each.past_names, dtype, each.past_shape, store.addresses, past)
            binding.outputs(each.new_names, dtype, each.new_shape, store.new_addresses(window), new)
        self.bound = wanted


class StaticGraph:
    """A graph whose inputs and outputs are bound once; a step writes small inputs and moves the cache's window.

    Attributes:
        record: what the manifest says of the graph.
        ar: tokens per inference.
        steps: steps run.
        run_ns: time within the runtime's own run, of all steps, ns.
        host_ns: all other time of the steps: inputs, bindings and the cache's copies, ns.
    """

    def __init__(
        self,
        binding: Binding,
        manifest: Manifest,
        record: GraphRecord,
        cache: KVCache,
        ropes: Mapping[str, RopeTable],
    ) -> None:
        """Bind a loaded graph to a cache; `ropes` are those of `rope_tables`.

        Raises:
            BundleError: the graph has not the inputs and outputs that the manifest promises.
        """
        signature = Signature.of(manifest, record)
        signature.check(binding.signature, record)
        self.record = record
        self.ar = record.ar
        self.steps = 0
        self.run_ns = 0
        self.host_ns = 0
        self._binding = binding
        masks = [manifest.mask(group.geometry.context) for group in cache.groups]
        mask_encoding = manifest.encodings["attention_mask"].encoding()
        self._inputs = StepInputs(signature.inputs, masks, mask_encoding, manifest.tokens.pad or 0, ropes)
        for name, array in self._inputs.arrays.items():
            binding.inputs([name], array.dtype, array.shape, [array.ctypes.data])
        (logits,) = (port for port in signature.outputs if port.name == "logits")
        array = aligned_zeros(logits.shape, logits.dtype)
        binding.outputs([logits.name], array.dtype, array.shape, [array.ctypes.data])
        self._logits = array[0]
        self.use(cache)

    @property
    def logits(self) -> NDArray[Any]:
        """The logits of the last step as integers `[rows, V]`, in the graph's own memory.

        One row, of the last token; the graph of role `score` has one for each of the step's tokens.
        """
        rows: NDArray[Any] = self._logits[: self._inputs.filled] if self.record.role == "score" else self._logits
        return rows

    def use(self, cache: KVCache) -> None:
        """Work on another cache of the same geometry from the next step on."""
        self._cache = cache
        self._groups = [_GroupEnds(group, self.ar, self.record.context) for group in cache.groups]

    def step(self, tokens: Sequence[int]) -> None:
        """Run 1 to AR tokens and keep their keys and values.

        Raises:
            ContextFullError: the cache has no room for a step of this graph.
            EngineError: the runtime failed; the cache is as it was before the step.
        """
        started = perf_counter_ns()
        if not 1 <= len(tokens) <= self.ar:
            raise ValueError(f"tokens: found {len(tokens)}; wanted 1 to {self.ar}")
        windows = self._cache.window(self.ar, self.record.context)
        # Only now: a policy that lets tokens leave here may move the others.
        position = self._cache.position
        self.host_ns += perf_counter_ns() - started
        self.run(tokens, position, windows)
        started = perf_counter_ns()
        self._cache.commit(len(tokens))
        self.host_ns += perf_counter_ns() - started

    def run(self, tokens: Sequence[int], position: int, windows: Sequence[Window], columns: Sequence[int] = ()) -> None:
        """Run tokens on open windows of the cache; whoever opened them keeps what the graph wrote.

        Args:
            tokens: 1 to AR.
            position: absolute position of the first one.
            windows: where the graph reads and writes in each group of the cache.
            columns: of the past, to be seen beside those that the windows name.

        Raises:
            EngineError: the runtime failed.
        """
        started = perf_counter_ns()
        self._inputs.write(tokens, position, windows, columns)
        for group, window in zip(self._groups, windows, strict=True):
            group.bind(self._binding, window)
        entered = perf_counter_ns()
        try:
            self._binding.run()
        except Exception as error:  # the runtime's exceptions have no common base
            raise EngineError(
                f"running {self.record.name}",
                found=" ".join(str(error).split()),
                wanted="a step",
                way_out="Try another --engine; if it runs there, report this graph.",
            ) from None
        self.run_ns += perf_counter_ns() - entered
        self.host_ns += entered - started
        self.steps += 1
