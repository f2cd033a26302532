"""Experts as operands of one graph: the host binds the addresses of the integers that a router has chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle
from edgekv.errors import BundleError
from edgekv.kv.memory import ALIGNMENT_BYTES, Allocate, HeapMemory, aligned, aligned_zeros
from edgekv.runtime.binding import Binding
from edgekv.spec import (
    EXPERT_INPUT,
    EXPERT_MATRICES,
    EXPERT_SCALES,
    EXPERT_SHARES,
    EXPERT_SUM,
    EXPERTS,
    ExpertSteps,
    GraphRecord,
    Port,
    divided_at_routers,
    expert_ports,
)
from edgekv.spec.tensors import expert_projection

_SIGN = np.uint8(0x80)  # int8 plus 128, as uint8


@dataclass(frozen=True, slots=True)
class _Place:
    """An operand of the graph of experts: its port, without the number of the expert, and its offset in an expert."""

    port: Port
    offset: int


class ExpertOperands:
    """The integers of all experts of a bundle, in one allocation: expert E of a layer is at a fixed distance.

    Attributes:
        steps: of the integers.
        file: of the graph of experts, by which its binary is known.
        used: experts of a token.
        places: the operands of an expert.
        expert_bytes: between two experts.
    """

    def __init__(self, bundle: Bundle, steps: ExpertSteps) -> None:
        """Read nothing yet.

        Raises:
            BundleError: the bundle has no experts.
        """
        spec = bundle.manifest.model
        if spec.experts is None:
            fix = "Compile the bundle again, with --force."
            raise BundleError("expert_steps", got="them for a model without experts", expected="none", fix=fix)
        self.steps = steps
        self.file = bundle.path / f"{EXPERTS}.onnx"
        self._bundle = bundle
        self._rows = {layer: row for row, layer in enumerate(sorted(spec.experts.layers))}
        self._count, self.used = spec.experts.count, spec.experts.used
        inputs, _ = expert_ports(spec.hidden, spec.experts.intermediate, self.used)
        self.places, at = list[_Place](), 0
        for port in (port for port in inputs if port.name.endswith("_0") and not port.name.startswith("share")):
            self.places.append(_Place(port, at))
            at += aligned(int(np.prod(port.shape)) * np.dtype(port.dtype).itemsize)
        self.expert_bytes = at
        self._memory: NDArray[np.uint8] | None = None

    @property
    def graphs(self) -> dict[str, GraphRecord]:
        """The divided decode graphs, by the names of those that they stand for."""
        manifest = self._bundle.manifest
        decode = [graph for graph in manifest.graphs if graph.role == "decode"]
        layers = manifest.model.layers
        return {graph.name: divided_at_routers(graph, layers, frozenset(self._rows)) for graph in decode}

    @property
    def held_bytes(self) -> int:
        """Of all experts, once they are read."""
        return len(self._rows) * self._count * self.expert_bytes

    def load(self, allocate: Allocate | None) -> int:
        """Read the experts, if they are not; returns the address of the first.

        Args:
            allocate: the memory; None for plain memory.
        """
        if self._memory is None:
            memory = (allocate or HeapMemory)(self.held_bytes + ALIGNMENT_BYTES)
            shape = (len(self._rows), self._count, self.expert_bytes)
            experts: NDArray[np.uint8] = np.ndarray(shape, np.uint8, memory.buffer, memory.offset)
            for layer, row in self._rows.items():
                for expert in range(self._count):
                    self._fill(layer, expert, experts[row, expert])
            self._memory = experts
        return self._memory.ctypes.data

    def _fill(self, layer: int, expert: int, memory: NDArray[np.uint8]) -> None:
        weights, places = self._bundle.weights(), iter(self.places)
        for matrix in EXPERT_MATRICES:
            weight = weights.matrix(f"model.layers.{layer}.{expert_projection(expert, matrix + '_proj')}.weight")
            integers = np.ascontiguousarray(weight.integers).view(np.uint8) ^ _SIGN
            scales = EXPERT_SCALES.quantize(weight.grid.scales / np.float32(self.steps[matrix]))
            for place, values in zip((next(places), next(places)), (integers, scales), strict=True):
                content = values.reshape(-1).view(np.uint8)
                memory[place.offset : place.offset + content.size] = content

    def offset(self, layer: int, expert: int) -> int:
        """Of an expert, from the first, in bytes."""
        return (self._rows[layer] * self._count + expert) * self.expert_bytes


class RoutedExperts:
    """The graph of a token's experts, bound to the memory of a divided decode graph."""

    def __init__(self, binding: Binding, operands: ExpertOperands, allocate: Allocate | None) -> None:
        """Bind the inputs and outputs that do not move.

        Args:
            binding: of the graph of experts.
            operands: the integers, which are read if they are not.
            allocate: their memory; None for plain memory.
        """
        self._binding, self._operands = binding, operands
        self._first = operands.load(allocate)
        # Each share is at a boundary of its own.
        self._shares = aligned_zeros((operands.used, ALIGNMENT_BYTES // 2), "uint16")
        for expert, row in enumerate(self._shares):
            binding.inputs([f"share_{expert}"], row.dtype, [1, 1, 1, 1], [row.ctypes.data])
        self._all_shares: NDArray[Any] = self._shares[0]
        self._names = [
            ([f"{place.port.name[:-1]}{expert}" for expert in range(operands.used)], place) for place in operands.places
        ]

    def use(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Read and write this memory of a divided graph, by the names of its ports."""
        (self._all_shares,) = arrays[EXPERT_SHARES].reshape(1, -1)
        for bind, name in ((self._binding.inputs, EXPERT_INPUT), (self._binding.outputs, EXPERT_SUM)):
            bind([name], arrays[name].dtype, arrays[name].shape, [arrays[name].ctypes.data])

    def chosen(self) -> Sequence[int]:
        """The experts with the largest weights, ascending."""
        used = self._operands.used
        numbers: list[int] = np.sort(np.argpartition(-self._all_shares.astype(np.int32), used - 1)[:used]).tolist()
        return numbers

    def run(self, layer: int) -> None:
        """Compute the experts that the router of a layer has chosen."""
        operands, experts = self._operands, self.chosen()
        self._shares[:, 0] = self._all_shares[experts]
        addresses = [self._first + operands.offset(layer, expert) for expert in experts]
        for names, place in self._names:
            self._binding.inputs(names, np.dtype(place.port.dtype), place.port.shape, addresses, place.offset)
        self._binding.run()

    def release(self) -> None:
        """See `Binding`."""
        self._binding.release()
