"""One static graph on bound memory, stepping through a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgekv.bundle import GraphRecord, Manifest, rope_inputs
from edgekv.engine.binding import MemoryBinding
from edgekv.engine.rope import RopeTable
from edgekv.engine.signature import Signature
from edgekv.errors import EngineError
from edgekv.kv import KVCache, Store, Window

_ATTEND = 65535


class _Ends:
    """The graph inputs and outputs that one store of the cache serves."""

    __slots__ = ("new_names", "new_shape", "past_names", "past_shape", "store")

    def __init__(self, store: Store, ar: int) -> None:
        self.store = store
        self.past_names = [tensor.past for tensor in store.tensors]
        self.new_names = [tensor.new for tensor in store.tensors]
        self.past_shape = store.past_shape(ar)
        self.new_shape = store.new_shape(ar)


class StaticGraph:
    """A session whose inputs and outputs are bound once; a step writes small inputs and moves the cache's window.

    Attributes:
        record: what the manifest says of the graph.
        ar: tokens per inference.
        steps: steps run.
        run_ns: time within the runtime's own run, of all steps, ns.
        host_ns: all other time of the steps: inputs, bindings and the cache's copies, ns.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        manifest: Manifest,
        record: GraphRecord,
        cache: KVCache,
        ropes: Mapping[str, RopeTable],
    ) -> None:
        """Bind a session to a cache; `ropes` are those of `rope_tables`.

        Raises:
            BundleError: the graph has not the inputs and outputs that the manifest promises.
        """
        signature = Signature.of(manifest, record)
        signature.check(session, record)
        self.record = record
        self.ar = record.ar
        self.steps = 0
        self.run_ns = 0
        self.host_ns = 0
        self._cache = cache
        self._pad = manifest.tokens.pad or 0
        self._binding = MemoryBinding(session)
        self._arrays = self._bind_arrays(signature)
        self._ids = self._arrays["input_ids"][0]
        self._mask = self._arrays["attention_mask"][0, 0]
        self._rotary = [
            (table, *(self._arrays[name][0, 0] for name in rope_inputs(suffix))) for suffix, table in ropes.items()
        ]
        self._index = self._arrays.get("logits_index")
        self._logits = self._arrays["logits"][0]
        self._past_rows = record.context - record.ar
        self._causal = np.tril(np.full((self.ar, self.ar), _ATTEND, np.uint16))
        self._filled = 0
        self._ends = [_Ends(store, self.ar) for store in cache.stores]
        self._bound: tuple[int, int] | None = None

    @property
    def logits(self) -> NDArray[Any]:
        """The logits of the last step as integers `[rows, V]`, in the graph's own memory.

        One row, of the last token; the graph of role `score` has one for each of the step's tokens.
        """
        rows: NDArray[Any] = self._logits[: self._filled] if self.record.role == "score" else self._logits
        return rows

    def use(self, cache: KVCache) -> None:
        """Work on another cache of the same geometry from the next step on."""
        self._cache = cache
        self._ends = [_Ends(store, self.ar) for store in cache.stores]
        self._bound = None

    def step(self, tokens: Sequence[int]) -> None:
        """Run 1 to AR tokens and keep their keys and values.

        Raises:
            ContextFullError: the cache has no room for a step of this graph.
            EngineError: the runtime failed; the cache is as it was before the step.
        """
        started = perf_counter_ns()
        if not 1 <= len(tokens) <= self.ar:
            raise ValueError(f"tokens: found {len(tokens)}; wanted 1 to {self.ar}")
        (window,) = self._cache.window(self.ar)
        # Only now: a policy that lets tokens leave here may move the others.
        position = self._cache.position
        self.host_ns += perf_counter_ns() - started
        self.run(tokens, position, window)
        started = perf_counter_ns()
        self._cache.commit(len(tokens))
        self.host_ns += perf_counter_ns() - started

    def run(self, tokens: Sequence[int], position: int, window: Window, columns: Sequence[int] = ()) -> None:
        """Run tokens on an open window of the cache; whoever opened it keeps what the graph wrote.

        Args:
            tokens: 1 to AR.
            position: absolute position of the first one.
            window: where the graph reads and writes.
            columns: of the past, to be seen beside those that the window names.

        Raises:
            EngineError: the runtime failed.
        """
        started = perf_counter_ns()
        self._write_inputs(tokens, position, window)
        if columns:
            self._mask[: len(tokens), columns] = _ATTEND
        if self._bound != (window.past_row, window.new_row):
            self._bind_cache(window)
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

    def _bind_arrays(self, signature: Signature) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {}
        for ports, bind in (
            (signature.inputs, self._binding.input_array),
            (signature.outputs, self._binding.output_array),
        ):
            for port in ports:
                if not port.name.startswith("past_"):
                    arrays[port.name] = np.zeros(port.shape, port.dtype)
                    bind(port.name, arrays[port.name])
        return arrays

    def _write_inputs(self, tokens: Sequence[int], position: int, window: Window) -> None:
        n, past = len(tokens), self._past_rows
        self._ids[:n] = tokens
        for table, cos, sin in self._rotary:
            cos[:n], sin[:n] = table.rows(position, n)
        self._mask[:n, :past] = 0
        self._mask[:n, window.first : window.stop] = _ATTEND
        if n == self._filled:
            return
        # The other rows are read by nobody; a row without an open column is harmless.
        self._ids[n:] = self._pad
        for table, cos, sin in self._rotary:
            cos[n:], sin[n:] = table.rows(0, 1)
        self._mask[n:] = 0
        self._mask[:n, past:] = self._causal[:n]
        if self._index is not None:
            self._index[0] = n - 1
        self._filled = n

    def _bind_cache(self, window: Window) -> None:
        for ends in self._ends:
            store, dtype = ends.store, ends.store.dtype
            past, new = store.past_offset_bytes(window), store.new_offset_bytes(window)
            self._binding.inputs(ends.past_names, dtype, ends.past_shape, store.addresses, past)
            self._binding.outputs(ends.new_names, dtype, ends.new_shape, store.new_addresses(window), new)
        self._bound = (window.past_row, window.new_row)
