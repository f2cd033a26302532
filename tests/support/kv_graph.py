"""A stand-in for a bound graph: it reads and writes a cache by address alone."""

from __future__ import annotations

import ctypes
import struct

import numpy as np

from edgekv.kv import Arena, KVCache, RowSpec, Window

GARBAGE = 0xFFFFFFFF
ROW_BYTES = 8


def geometry_of(context: int, kv_dtype: str = "u8", *, row_bytes: int = ROW_BYTES, **sizes: object) -> RowSpec:
    """Two heads whose rows have room for a token's number and its tensor's."""
    head_dim = row_bytes if kv_dtype == "u8" else row_bytes // 2
    return RowSpec(**{"layers": 1, "kv_heads": 2, "head_dim": head_dim, "window": context, **sizes}, kv_dtype=kv_dtype)


def memory(store: Arena, address: int, shape: list[int]) -> np.ndarray:
    """The elements at an address."""
    size_bytes = int(np.prod(shape)) * store.dtype.itemsize
    return np.frombuffer((ctypes.c_uint8 * size_bytes).from_address(address), store.dtype).reshape(shape)


def rows_of(store: Arena, tensor: int, address: int, shape: list[int]) -> np.ndarray:
    """The same as `[tokens, D]`, however they lie."""
    matrix = memory(store, address, shape)[0, 0]
    is_columns = store.tensors[tensor].kind == "key" and store.layout.geometry.key_layout == "columns"
    return matrix.T if is_columns else matrix


class Graph:
    """A row says its token and its tensor."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def past(self, window: Window) -> list[int]:
        """Tokens of the valid past columns, after a check that all tensors agree."""
        seen = set()
        for store in self.cache.arenas:
            assert window.stop <= self.cache.geometry.context - window.ar
            for tensor, base in enumerate(store.addresses):
                address = base + store.past_offset_bytes(window)
                rows = rows_of(store, tensor, address, store.past_shape(window.columns))
                seen.add(tuple(tokens(store, tensor, rows[window.first : window.stop])))
        assert len(seen) == 1
        return list(seen.pop())

    def write(self, window: Window, numbers: list[int]) -> None:
        """Fill all AR new rows; those behind the given tokens with garbage."""
        for store in self.cache.arenas:
            for tensor, base in enumerate(store.new_addresses(window)):
                address = base + store.new_offset_bytes(window)
                rows = rows_of(store, tensor, address, store.new_shape(window.ar))
                assert len(rows) == window.ar
                for row in range(window.ar):
                    token = numbers[row] if row < len(numbers) else GARBAGE
                    rows[row] = row_of(store, tensor, token)


def owner(store: Arena, tensor: int) -> int:
    """A number for a tensor."""
    it = store.tensors[tensor]
    return 1000 * it.layer + 10 * it.head + (it.kind == "key")


def row_of(store: Arena, tensor: int, token: int) -> np.ndarray:
    name = np.frombuffer(struct.pack("<II", token, owner(store, tensor)), store.dtype)
    return np.resize(name, store.new_shape(1)[2] * store.new_shape(1)[3])


def tokens(store: Arena, tensor: int, rows: np.ndarray) -> list[int]:
    """The tokens of rows, after a check that they are of this tensor."""
    names = np.ascontiguousarray(rows[:, : ROW_BYTES // store.dtype.itemsize]).tobytes()
    pairs = list(struct.iter_unpack("<II", names))
    assert all(found == owner(store, tensor) for _, found in pairs)
    return [token for token, _ in pairs]


def held(cache: KVCache) -> list[int]:
    """The tokens held, oldest first, after a check that all tensors agree."""
    rows = cache.held_rows()
    seen = {
        tuple(tokens(store, tensor, store.read(tensor, rows)))
        for store in cache.arenas
        for tensor in range(len(store.tensors))
    }
    assert len(seen) == 1
    return list(seen.pop())


def feed(cache: KVCache, ar: int, numbers: list[int], context: int | None = None) -> list[int]:
    """One step; returns the tokens that it saw."""
    (window,) = cache.window(ar, context)
    graph = Graph(cache)
    past = graph.past(window)
    graph.write(window, numbers)
    cache.commit(len(numbers))
    return past


def image(cache: KVCache) -> tuple[object, ...]:
    """Everything that a call could change."""
    stores = [
        ctypes.string_at(store.addresses[0], store.layout.stride_bytes * len(store.tensors)) for store in cache.arenas
    ]
    return (stores, cache.length, cache.tokens_seen, cache.held_rows(), cache.stats)
