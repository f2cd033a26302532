"""The matrices of an adapter in the memory that graphs are bound to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.kv.memory import aligned_zeros
from edgekv.spec import FLOAT, STACK, Port
from quant import Encoding


class AdapterMemory:
    """What the inputs for adapters read, in integers, and in float32 for graphs that read them dequantized.

    One memory serves all graphs, and binding another is a swap.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]], encodings: Mapping[str, Encoding]) -> None:
        """Args: arrays: int16, by port; they must not change afterwards. encodings: by port; none if all are 0."""
        self._arrays = arrays
        self._encodings = encodings
        self._held: dict[Port, NDArray[Any]] = {}

    def address(self, port: Port) -> int:
        """Where a port reads. What is not there as int16 and alone is made once, and kept."""
        if port not in self._held:
            self._held[port] = self._made(port)
        return int(self._held[port].ctypes.data)

    def integers(self, name: str) -> NDArray[Any]:
        """What an input reads, int16."""
        return self._arrays[name]

    def floats(self) -> Iterator[tuple[str, NDArray[np.float32], float]]:
        """Name, dequantized values and scale of each input; nothing if all are 0."""
        for name, encoding in self._encodings.items():
            yield name, encoding.dequantize(self._arrays[name]), encoding.scale

    def _made(self, port: Port) -> NDArray[Any]:
        if not self._encodings:
            return self._zeros(port)
        names = port.name.split(STACK)
        if port.dtype != FLOAT and len(names) == 1:
            return self._arrays[port.name]
        made = aligned_zeros(port.shape, "float32" if port.dtype == FLOAT else port.dtype)
        for row, name in zip(made[:, None] if len(names) > 1 else [made], names, strict=True):
            integers = self._arrays[name]
            row[...] = self._encodings[name].dequantize(integers) if port.dtype == FLOAT else integers
        return made

    def _zeros(self, port: Port) -> NDArray[Any]:
        """Zeros that all ports of up to this size share."""
        needed_bytes = math.prod(port.shape) * np.dtype(np.float32).itemsize
        zeros = next((array for array in self._held.values() if array.nbytes >= needed_bytes), None)
        return aligned_zeros((needed_bytes,), "uint8") if zeros is None else zeros


NO_ADAPTER = AdapterMemory({}, {})
"""Zeros."""
