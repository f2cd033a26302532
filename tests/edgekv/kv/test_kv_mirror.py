"""The ring that is mapped twice: it never copies, and its pages are given back."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgekv.errors import EngineError, UsageError
from edgekv.kv import KVCache, Layout, Mirror, Move, RowArena, RowSpec
from edgekv.kv.memory import MirrorMemory
from tests.support.kv_graph import feed, geometry_of, held

GEOMETRY = RowSpec(layers=2, kv_heads=2, head_dim=64, window=512)


def mappings() -> int:
    return sum("edgekv-mirror" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_ten_contexts_of_tokens_copy_no_byte():
    cache = KVCache(GEOMETRY, ar=[1, 32], strategy="mirror", policy="sliding-window")
    for step in range(10 * 512):
        cache.window(32 if step % 97 == 0 else 1)
        cache.commit(1)
    assert cache.length == 511
    assert cache.stats.bytes_copied == cache.stats.copies == 0


def test_every_window_is_one_contiguous_piece_wherever_the_head_is():
    cache = KVCache(geometry_of(20, row_bytes=1024), ar=[1, 4], strategy="mirror", policy="sliding-window")
    for token in range(300):
        assert feed(cache, 1, [token]) == list(range(max(0, token - 19), token))
    assert feed(cache, 4, [300, 301]) == list(range(284, 300))
    assert held(cache) == list(range(283, 302))


@given(
    head_dim=st.integers(1, 300),
    context=st.integers(2, 5000),
    max_ar=st.integers(1, 128),
    kv_dtype=st.sampled_from(["u8", "s16"]),
    page_bytes=st.sampled_from([4096, 16384]),
)
def test_a_ring_is_the_fewest_rows_that_fill_whole_pages(head_dim, context, max_ar, kv_dtype, page_bytes):
    geometry = RowSpec(1, 1, head_dim, context, kv_dtype)
    rows = Mirror(geometry, max_ar=max_ar, page_bytes=page_bytes).rows
    assert rows * geometry.row_bytes % page_bytes == 0
    needed = context - 1 + max_ar
    assert rows >= needed
    assert not any(fewer * geometry.row_bytes % page_bytes == 0 for fewer in range(needed, rows))


def test_memory_is_one_past_and_a_step_and_addresses_are_twice_as_many():
    layout = Layout.of(GEOMETRY, Mirror(GEOMETRY, max_ar=1, page_bytes=4096))
    assert (layout.rows, layout.reach_rows, layout.stride_bytes) == (512, 1024, 1024 * 64)
    assert layout.allocated_bytes == GEOMETRY.tensors * 512 * 64


def test_both_halves_are_the_same_memory():
    arena = RowArena(Layout.of(GEOMETRY, Mirror(GEOMETRY, max_ar=32)))
    period_bytes = arena.layout.rows * arena.row_bytes
    assert np.all(arena.array == 128)
    for tensor, address in enumerate(arena.addresses):
        assert address % mmap.PAGESIZE == 0
        arena.view(tensor)[5] = tensor + 1
        assert ctypes.string_at(address + period_bytes + 5 * 64, 64) == bytes([tensor + 1]) * 64


def test_a_move_may_run_over_the_end_of_the_ring():
    arena = RowArena(Layout.of(GEOMETRY, Mirror(GEOMETRY, max_ar=1)))
    arena.array[:] = (np.arange(512) % 251)[:, None]
    arena.execute(Move(508, 510, 5))
    assert list(arena.array[1, [510, 511, 0, 1, 2, 3], 0]) == [510 % 251 - 2, 510 % 251 - 1, 8, 9, 0, 3]


@pytest.mark.slow
def test_mappings_end_with_the_last_array_on_them():
    gc.collect()
    before = mappings()
    arena = RowArena(Layout.of(GEOMETRY, Mirror(GEOMETRY, max_ar=1)))
    view = arena.view(0)
    assert mappings() > before
    del arena
    gc.collect()
    view[:] = 7
    assert mappings() > before
    del view
    gc.collect()
    assert mappings() == before


def test_a_system_without_anonymous_files_is_told_what_to_use(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UsageError, match=r"mirror: got a system without memfd_create.*pointer-shift or slot"):
        KVCache(GEOMETRY, ar=[1], strategy="mirror")


def test_a_system_that_refuses_keeps_nothing_mapped():
    before = mappings()
    with pytest.raises(EngineError, match=r"mirror: got .* rings of .*pointer-shift or slot"):
        MirrorMemory(1 << 20, 1 << 40)
    assert mappings() == before


def test_a_ring_must_be_whole_pages():
    with pytest.raises(ValueError, match="ring_bytes, beside_bytes: got 100 and 0"):
        MirrorMemory(1, 100)


def test_keys_as_columns_lie_in_a_ring_as_large_as_that_of_values():
    """A token copies its keys' elements and nothing else, as often as the head goes round."""
    geometry = replace(GEOMETRY, window=64, key_layout="columns")
    cache = KVCache(geometry, ar=[1], strategy="mirror", policy="sliding-window")
    keys, values = cache.arenas
    assert keys.layout.ring_bytes == values.layout.rows * geometry.row_bytes == mmap.PAGESIZE
    tokens = 2 * keys.layout.rows + 100  # twice around
    for _ in range(tokens):
        cache.window(1)
        cache.commit(1)
    assert cache.stats.copies == tokens
    assert (keys.bytes_copied, values.bytes_copied) == (tokens * 4 * 64, 0)
    assert cache.bytes_held == 2 * geometry.tensors // 2 * mmap.PAGESIZE + 4 * mmap.PAGESIZE  # and pages beside keys


def test_the_ring_of_keys_is_mapped_twice_in_front_of_plain_memory():
    memory = MirrorMemory(2, mmap.PAGESIZE, mmap.PAGESIZE)
    rings = np.ndarray((2, 3, mmap.PAGESIZE), np.uint8, memory.buffer)
    rings[:] = 0
    rings[0, 1, 5], rings[1, 0, 6], rings[0, 2, 7] = 1, 2, 3
    assert (rings[0, 0, 5], rings[1, 1, 6], rings[0, 2, 7], int(rings.sum())) == (1, 2, 3, 2 * (1 + 2) + 3)
    assert memory.held_bytes == 4 * mmap.PAGESIZE
