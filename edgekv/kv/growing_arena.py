"""Buffers that really grow, layer by layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.kv.geometry import Geometry, KvDtype
from edgekv.kv.growth import Growth

Rows = NDArray[Any]

_DTYPES: dict[KvDtype, type[np.uint8] | type[np.int16]] = {"u8": np.uint8, "s16": np.int16}


class GrowingArena:
    """One buffer for each layer, `[2 x kv_heads, rows, D]`, keys before values, replaced by a larger one as needed.

    A step is `begin(n)`, then the graph, then `end(n)`: the buffers that a step outgrows live until its end.

    Attributes:
        geometry: the sizes of the cache; its context bounds nothing here.
        growth: how many rows each layer has when.
        peak_bytes: the most bytes that lived at once.
        bytes_copied: bytes that growing has copied.
    """

    def __init__(self, geometry: Geometry, growth: Growth, *, known_tokens: int = 0) -> None:
        """Allocate the first buffers, with room for `known_tokens`.

        Raises:
            ValueError: the growth is of another number of layers.
        """
        if growth.layers != geometry.layers:
            raise ValueError(f"growth: found {growth.layers} layers; wanted {geometry.layers}")
        self.geometry = geometry
        self.growth = growth
        self.bytes_copied = 0
        self._length = 0
        self._homes = [growth.home(layer, known_tokens) for layer in range(geometry.layers)]
        self._buffers = [self._allocate(growth.rows(layer, known_tokens)) for layer in range(geometry.layers)]
        self._outgrown: list[Rows] = []
        self.peak_bytes = self.live_bytes

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._length

    @property
    def live_bytes(self) -> int:
        """Bytes of all buffers, those included that the open step has outgrown."""
        return sum(buffer.nbytes for buffer in (*self._buffers, *self._outgrown))

    def buffer(self, layer: int) -> Rows:
        """All rows of a layer, `[2 x kv_heads, rows, D]`, until the layer grows."""
        return self._buffers[layer]

    def home(self, layer: int) -> int:
        """The row of the oldest token."""
        return self._homes[layer]

    def held(self, layer: int) -> Rows:
        """The rows of the tokens held, oldest first, `[2 x kv_heads, length, D]`."""
        home = self._homes[layer]
        return self._buffers[layer][:, home : home + self._length]

    def new(self, layer: int, tokens: int) -> Rows:
        """Where the next tokens' rows land, `[2 x kv_heads, tokens, D]`."""
        head = self._homes[layer] + self._length
        return self._buffers[layer][:, head : head + tokens]

    def begin(self, tokens: int) -> list[int]:
        """Make room for the rows of the next tokens; return the layers that grew."""
        self._outgrown.clear()
        end = self._length + tokens
        grown = []
        for layer, buffer in enumerate(self._buffers):
            rows = self.growth.rows(layer, end)
            if rows <= buffer.shape[1]:
                continue
            home = self.growth.home(layer, end)
            larger = self._allocate(rows)
            larger[:, home : home + self._length] = self.held(layer)
            self.bytes_copied += self.held(layer).nbytes
            self._outgrown.append(buffer)
            self._buffers[layer] = larger
            self._homes[layer] = home
            grown.append(layer)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return grown

    def end(self, tokens: int) -> None:
        """Keep the new rows of the step, and let go of what it outgrew.

        Raises:
            ValueError: rows that `begin` made no room for.
        """
        for layer, buffer in enumerate(self._buffers):
            if self._homes[layer] + self._length + tokens > buffer.shape[1]:
                raise ValueError(f"end: found {tokens} tokens; wanted no more than begin(n) made room for")
        self._length += tokens
        self._outgrown.clear()

    def _allocate(self, rows: int) -> Rows:
        shape = (2 * self.geometry.kv_heads, rows, self.geometry.head_dim)
        return np.full(shape, self.geometry.zero_point, _DTYPES[self.geometry.kv_dtype])
