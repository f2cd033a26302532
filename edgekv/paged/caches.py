"""The paged keys and values: checked once, then written and read by (block, slot)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.paged.arrays import Floats, Ints, check_array, check_shape, shape_text
from edgekv.paged.errors import PagedInputError

FLOATS = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Places of tokens: token i is in slot `slots[i]` of block `blocks[i]`; both `[tokens]`."""

    blocks: Ints
    slots: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Caches:
    """The memory of all blocks; it belongs to the caller and is updated in place.

    Attributes:
        key: `[num_blocks, Hk, bs, S]`, float16, float32 or float64.
        value: `[num_blocks, Hk, bs, Sv]`, of the same type.
    """

    key: Floats
    value: Floats

    def __post_init__(self) -> None:
        dtype = getattr(self.key, "dtype", None)
        if dtype not in FLOATS:
            got = dtype or type(self.key).__name__
            raise PagedInputError("key_cache", got=got, expected="a numpy array of float16, float32 or float64")
        for field, array in (("key_cache", self.key), ("value_cache", self.value)):
            check_array(field, array, dtype, 4)
            if 0 in array.shape[1:]:
                raise PagedInputError(field, got=shape_text(array.shape), expected="no empty dimension after the first")
            if not array.flags.writeable:
                raise PagedInputError(field, got="a read-only array", expected="one that can be updated in place")
        check_shape(
            "value_cache", self.value, (*self.key.shape[:3], self.value.shape[3]), "but for the last as key_cache"
        )
        if np.shares_memory(self.key, self.value):
            raise PagedInputError("value_cache", got="memory shared with key_cache", expected="memory of its own")

    @property
    def dtype(self) -> np.dtype[Any]:
        """T, the type of every float tensor of the operator."""
        return self.key.dtype

    @property
    def blocks(self) -> int:
        """Blocks of the pool, owned or not."""
        return self.key.shape[0]

    @property
    def kv_heads(self) -> int:
        """Hk."""
        return self.key.shape[1]

    @property
    def block_tokens(self) -> int:
        """bs, the tokens that a block holds."""
        return self.key.shape[2]

    @property
    def key_size(self) -> int:
        """S, elements of one head's key."""
        return self.key.shape[3]

    @property
    def value_size(self) -> int:
        """Sv, elements of one head's value."""
        return self.value.shape[3]

    def insert(self, key: Floats, value: Floats, places: Places) -> None:
        """Write tokens `[n, Hk*S]` and `[n, Hk*Sv]` to their places; the last write to a place wins."""
        self.key[places.blocks, :, places.slots] = key.reshape(-1, self.kv_heads, self.key_size)
        self.value[places.blocks, :, places.slots] = value.reshape(-1, self.kv_heads, self.value_size)

    def room(self, heads: int, tokens: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Memory for `gather`: `[tokens, heads, S]` and `[tokens, heads, Sv]`."""
        return np.empty((tokens, heads, self.key_size)), np.empty((tokens, heads, self.value_size))

    def gather(
        self, places: Places, heads: slice, room: tuple[NDArray[np.float64], NDArray[np.float64]]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Keys `[heads, n, S]` and values `[heads, n, Sv]` of these places, as views of `room`."""
        keys, values = (array[:, : heads.stop - heads.start] for array in room)
        keys[...] = self.key[places.blocks, heads, places.slots]
        values[...] = self.value[places.blocks, heads, places.slots]
        return keys.transpose(1, 0, 2), values.transpose(1, 0, 2)
