"""One part of a graph on memory: what the step gives it, what the part before left, and the cache of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import PartRecord
from edgekv.kv import Arena, Group, KVCache, Window
from edgekv.runtime.binding import Binding
from edgekv.runtime.signature import Port, Signature

_Bind = Callable[[Sequence[str], "np.dtype[Any]", Sequence[int], Sequence[int], int], None]


class _Ends:
    """The graph inputs and outputs that one store of the cache serves."""

    __slots__ = ("new_names", "new_shape", "past_names", "past_shape", "tensors")

    def __init__(self, store: Arena, layers: range, ar: int, columns: int) -> None:
        held = [index for index, tensor in enumerate(store.tensors) if tensor.layer in layers]
        self.tensors = slice(held[0], held[-1] + 1)  # a store holds its tensors layer by layer
        self.past_names = [tensor.past for tensor in store.tensors[self.tensors]]
        self.new_names = [tensor.new for tensor in store.tensors[self.tensors]]
        self.past_shape = store.past_shape(columns)
        self.new_shape = store.new_shape(ar)


class _GroupEnds:
    """Those of one group of layers, and where they are bound."""

    __slots__ = ("bound", "ends", "group")

    def __init__(self, group: Group, layers: range, ar: int, context: int) -> None:
        columns = group.geometry.past_rows(ar, context)
        self.group = group
        self.ends = [_Ends(store, layers, ar, columns) for store in group.arenas]
        self.bound: tuple[int, int, int] | None = None

    def bind(self, binding: Binding, window: Window) -> None:
        wanted = (self.group.reallocations, window.past_row, window.new_row)
        if self.bound == wanted:
            return
        # The group is asked anew: a graph that runs no more must not keep outgrown memory alive.
        for each, store in zip(self.ends, self.group.arenas, strict=True):
            dtype, tensors = store.dtype, each.tensors
            past, new = store.past_offset_bytes(window), store.new_offset_bytes(window)
            binding.inputs(each.past_names, dtype, each.past_shape, store.addresses[tensors], past)
            binding.outputs(each.new_names, dtype, each.new_shape, store.new_addresses(window)[tensors], new)
        self.bound = wanted


class BoundPart:
    """A part whose inputs and outputs are bound once; a step moves the cache's window, and the row of a head.

    Attributes:
        record: what the manifest says of it.
        is_head: whether it is a head by itself, which a step that nobody wants logits of can leave out.
    """

    def __init__(
        self, binding: Binding, record: PartRecord, signature: Signature, arrays: Mapping[str, NDArray[Any]]
    ) -> None:
        """Bind a loaded part to `arrays`, by name; those of the cache follow with `use`.

        Raises:
            BundleError: the part has not the inputs and outputs that its signature promises.
        """
        signature.check(binding.signature, record.file)
        self.record = record
        self.is_head = not record.layers
        self._binding = binding
        self._groups: list[tuple[int, _GroupEnds]] = []
        for port in signature.inputs:
            if port.name in arrays:
                _bind(binding.inputs, port, arrays[port.name])
        for port in signature.outputs:
            if port.name in arrays:
                _bind(binding.outputs, port, arrays[port.name])
        self._entry = signature.inputs[0]
        self._hidden = arrays[self._entry.name]
        self._row = 0
        self._has_one_row = self.is_head and self._entry.shape[2] == 1

    def use(self, cache: KVCache, ar: int, context: int) -> None:
        """Work on this cache from the next step on."""
        layers = self.record.layers
        self._groups = [
            (index, _GroupEnds(group, layers, ar, context))
            for index, group in enumerate(cache.groups)
            if any(tensor.layer in layers for tensor in group.geometry.names())
        ]

    def bind(self, windows: Sequence[Window], tokens: int) -> None:
        """Follow the windows of a step of so many tokens. A head of one row reads that of the last of them."""
        for index, group in self._groups:
            group.bind(self._binding, windows[index])
        if self._has_one_row and self._row != tokens - 1:
            self._row = tokens - 1
            _bind(self._binding.inputs, self._entry, self._hidden, self._row * self._hidden.strides[2])

    def run(self) -> None:
        """Run on what is bound."""
        self._binding.run()


def _bind(bind: _Bind, port: Port, array: NDArray[Any], offset_bytes: int = 0) -> None:
    bind([port.name], array.dtype, port.shape, [array.ctypes.data], offset_bytes)
