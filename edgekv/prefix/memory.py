"""The bytes of one pool."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgekv.prefix.rows import Rows

_SLAB_BYTES = 1 << 26


class BlockMemory:
    """Blocks `[tensors, tokens_per_block, D]` by id, allocated in slabs as ids come into use.

    Attributes:
        block_bytes: bytes of one block.
        bytes_held: bytes of all slabs so far.
    """

    def __init__(self, shape: tuple[int, int, int], dtype: np.dtype[Any], capacity: int) -> None:
        self.block_bytes = int(np.prod(shape)) * dtype.itemsize
        self.bytes_held = 0
        self._shape = shape
        self._dtype = dtype
        self._capacity = capacity
        self._per_slab = max(1, _SLAB_BYTES // self.block_bytes)
        self._slabs: dict[int, Rows] = {}

    def view(self, block: int) -> Rows:
        """One block, sharing the pool's memory.

        Raises:
            ValueError: no such id.
        """
        if not 0 <= block < self._capacity:
            raise ValueError(f"block: got {block}; expected 0 to {self._capacity - 1}")
        number, place = divmod(block, self._per_slab)
        slab = self._slabs.get(number)
        if slab is None:
            blocks = min(self._per_slab, self._capacity - number * self._per_slab)
            slab = self._slabs[number] = np.empty((blocks, *self._shape), self._dtype)
            self.bytes_held += slab.nbytes
        return slab[place]  # type: ignore[no-any-return]
