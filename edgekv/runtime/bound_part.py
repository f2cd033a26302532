"""A part of a graph whose inputs and outputs are bound to memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.kv import Arena, CacheGroup, KVCache, Window
from edgekv.runtime.adapter import AdapterMemory, AdapterPorts
from edgekv.runtime.binding import Binding
from edgekv.spec import GraphInterface, PartRecord, Port

_ROW_A_TOKEN = frozenset({"ids", "embeddings", "layer_inputs", "hidden", "cos", "sin"})
"""Kinds of ports with a row for each token, besides masks and the cache."""

_Bind = Callable[[Sequence[str], "np.dtype[Any]", Sequence[int], Sequence[int], int], None]


class _ArenaPorts:
    """The ports that one arena of the cache serves, for the layers of a part, or for a layer that it borrows."""

    __slots__ = ("new_names", "past_names", "tensors")

    def __init__(self, arena: Arena, layers: range) -> None:
        held = [index for index, tensor in enumerate(arena.tensors) if tensor.layer in layers]
        self.tensors = slice(held[0], held[-1] + 1)  # an arena holds its tensors layer by layer
        self.past_names = [tensor.past for tensor in arena.tensors[self.tensors]]
        self.new_names = [tensor.new for tensor in arena.tensors[self.tensors] if tensor.is_written]


class _GroupPorts:
    """The ports that one group of the cache serves, and where they are bound."""

    __slots__ = ("_borrows", "_window", "arenas", "bound", "group", "index")

    def __init__(self, index: int, group: CacheGroup, layers: range, *, borrows: bool = False) -> None:
        self.index = index
        self.group = group
        self.arenas = [_ArenaPorts(arena, layers) for arena in group.arenas]
        self._borrows = borrows
        self.bound: tuple[int, ...] | None = None
        self._window: Window | None = None

    def bind(self, binding: Binding, window: Window) -> None:
        """Bind the ports to a window, unless they already are."""
        bound = self.bound
        if window is self._window and bound is not None and bound[0] == self.group.reallocations:
            return
        self._window = window
        wanted = (self.group.reallocations, window.past_row, window.new_row, window.columns, window.ar)
        if bound == wanted:
            return
        self.bound = None  # until all ports are bound
        # Read the arenas from the group each time: keeping them would keep outgrown memory alive.
        for ports, arena in zip(self.arenas, self.group.arenas, strict=True):
            dtype, tensors = arena.dtype, ports.tensors
            past, new = arena.past_offset_bytes(window), arena.new_offset_bytes(window)
            binding.inputs(ports.past_names, dtype, arena.past_shape(window.columns), arena.addresses[tensors], past)
            if ports.new_names:
                new_shape, addresses = arena.new_shape(window.ar), arena.new_addresses(window)[tensors]
                bind = binding.inputs if self._borrows else binding.outputs  # another part has written borrowed rows
                bind(ports.new_names, dtype, new_shape, addresses, new)
        self.bound = wanted


class _MaskPort:
    """A mask's port, which is bound to as many rows and columns as the window of its group has."""

    __slots__ = ("_address", "_bound", "_dtype", "_name", "index")

    def __init__(self, port: Port, index: int, array: NDArray[Any]) -> None:
        self.index = index
        self._name = [port.name]
        self._dtype, self._address = array.dtype, [array.ctypes.data]
        self._bound: list[int] | None = [*port.shape]

    def bind(self, binding: Binding, window: Window) -> None:
        """Bind the port to a window, unless it already is."""
        wanted = [1, 1, window.ar, window.columns + window.ar]
        if self._bound != wanted:
            self._bound = None  # until it is bound
            binding.inputs(self._name, self._dtype, wanted, self._address)
            self._bound = wanted


class BoundPart:
    """A part whose inputs and outputs are bound once. A step rebinds only the cache's windows and a head's row.

    Attributes:
        is_needed: whether a step runs it even if its logits are not needed: it or a later part writes a cache.
        reads_used_rows: whether windows can have fewer columns than the graph's past rows.
        takes_fewer: whether steps can have fewer tokens than AR.
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
        borrowed: Sequence[int] = (),
        *,
        is_needed: bool = True,
    ) -> None:
        """Bind a loaded part to `arrays`, by name; the ports of the cache follow with `use`.

        Args:
            binding: of the part.
            record: the part's entry in the manifest.
            interface: the ports that it must have.
            arrays: the memory of its ports other than the cache's.
            mask_groups: the group of the cache that each mask belongs to.
            borrowed: layers of earlier parts whose caches it reads.
            is_needed: see the class.

        Raises:
            BundleError: the part does not have the inputs and outputs of its interface.
        """
        found = binding.interface
        interface = interface.with_adapters_like(found)
        interface.check(found, record.file)
        self._adapters = AdapterPorts(binding, interface.adapter_ports)
        is_head = not record.layers
        self.is_needed = is_needed
        self._borrowed = borrowed
        self.reads_used_rows = is_head or binding.reads_used_rows
        self.takes_fewer = binding.takes_fewer
        self.run = binding.run
        self.release = binding.release
        self._layers = record.layers
        self._binding = binding
        self._groups: list[_GroupPorts] = []
        for bind, ports in ((binding.inputs, interface.inputs), (binding.outputs, interface.outputs)):
            for port in ports:
                if port.name in arrays:
                    _bind(bind, port, arrays[port.name])
        self._by_tokens = [
            (bind, port)
            for bind, ports in ((binding.inputs, interface.inputs), (binding.outputs, interface.outputs))
            for port in ports
            if self.takes_fewer and port.kind in _ROW_A_TOKEN
        ]
        self._arrays = arrays
        self._tokens: int | None = None
        masks = [port for port in interface.inputs if port.name in mask_groups]
        self._masks = [_MaskPort(port, mask_groups[port.name], arrays[port.name]) for port in masks]
        self._entry = interface.entry
        self._hidden = arrays[self._entry.name]
        self._row: int | None = 0
        self._reads_one_row = is_head and self._entry.shape[2] == 1

    def use(self, cache: KVCache) -> None:
        """Use this cache from the next step on."""
        held = [{tensor.layer for tensor in group.geometry.names()} for group in cache.groups]
        self._groups = [
            _GroupPorts(index, group, self._layers)
            for index, group in enumerate(cache.groups)
            if not held[index].isdisjoint(self._layers)
        ]
        self._groups += [
            _GroupPorts(index, group, range(layer, layer + 1), borrows=True)
            for index, group in enumerate(cache.groups)
            for layer in self._borrowed
            if layer in held[index]
        ]

    def adapt(self, memory: AdapterMemory) -> None:
        """Read adapters from this memory from the next step on."""
        self._adapters.bind(memory)

    def bind(self, windows: Sequence[Window], tokens: int) -> None:
        """Bind to the windows of a step of `tokens` tokens. A head of one row reads the row of the last token."""
        for group in self._groups:
            group.bind(self._binding, windows[group.index])
        for mask in self._masks:
            mask.bind(self._binding, windows[mask.index])
        if self._by_tokens and self._tokens != tokens:
            self._bind_tokens(tokens)
        if self._reads_one_row and self._row != tokens - 1:
            self._row = None  # until it is bound
            _bind(self._binding.inputs, self._entry, self._hidden, (tokens - 1) * self._hidden.strides[2])
            self._row = tokens - 1

    def _bind_tokens(self, tokens: int) -> None:
        """Bind the inputs and outputs with a row for each token to the first rows of their memory."""
        self._tokens = None  # until all are bound
        for bind, port in self._by_tokens:
            shape = [1, tokens] if port.kind == "ids" else [1, 1, tokens, port.shape[-1]]
            array = self._arrays[port.name]
            bind([port.name], array.dtype, shape, [array.ctypes.data])
        self._tokens = tokens


def _bind(bind: _Bind, port: Port, array: NDArray[Any], offset_bytes: int = 0) -> None:
    bind([port.name], array.dtype, port.shape, [array.ctypes.data], offset_bytes)
