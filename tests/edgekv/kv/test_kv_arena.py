"""The arena: alignment, what is allocated, and copies that may overlap."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgekv.kv import Layout, Move, PointerShift, RowArena, RowSpec, Slot
from edgekv.kv.memory import aligned_zeros

SIZES = st.builds(
    RowSpec,
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 80),
    window=st.integers(2, 40),
    kv_dtype=st.sampled_from(["u8", "s16"]),
)


@given(geometry=SIZES, rows=st.integers(1, 50), scratch_rows=st.integers(0, 9))
def test_every_tensor_starts_on_a_64_byte_boundary_and_apart_from_the_others(geometry, rows, scratch_rows):
    layout = Layout(geometry, rows, scratch_rows)
    arena = RowArena(layout)
    bases = arena.addresses + arena.scratch_addresses
    sizes = [rows * geometry.row_bytes] * geometry.tensors + [scratch_rows * geometry.row_bytes] * geometry.tensors
    assert all(base % 64 == 0 for base in bases)
    assert all(base + size <= after for base, size, after in zip(bases, sizes, bases[1:], strict=False))
    assert len(bases) == geometry.tensors * (2 if scratch_rows else 1)
    assert bases[-1] + sizes[len(bases) - 1] - bases[0] <= arena.bytes_held == layout.allocated_bytes
    assert np.all(arena.array == geometry.zero_point)
    assert np.all(arena.scratch == geometry.zero_point)


@given(geometry=SIZES)
def test_addresses_views_and_the_array_are_the_same_memory(geometry):
    arena = RowArena(Layout(geometry, 3, 2))
    assert arena.array.shape == (geometry.tensors, 3, geometry.head_dim)
    assert arena.scratch.shape == (geometry.tensors, 2, geometry.head_dim)
    for tensor, address in enumerate(arena.addresses):
        view = arena.view(tensor)
        assert view.ctypes.data == arena.array[tensor].ctypes.data == address
        assert view[2:].ctypes.data == address + 2 * arena.row_bytes
        assert view.flags.c_contiguous
        assert arena.scratch[tensor].ctypes.data == arena.scratch_addresses[tensor]


@given(
    src=st.integers(0, 19),
    dst=st.integers(0, 19),
    rows=st.integers(1, 20),
    places=st.tuples(st.sampled_from(["arena", "scratch"]), st.sampled_from(["arena", "scratch"])),
    kv_dtype=st.sampled_from(["u8", "s16"]),
)
def test_a_move_copies_as_if_the_source_were_read_first(src, dst, rows, places, kv_dtype):
    rows = min(rows, 20 - max(src, dst))
    geometry = RowSpec(layers=1, kv_heads=2, head_dim=3, window=20, kv_dtype=kv_dtype)
    arena = RowArena(Layout(geometry, 20, 20))
    for seed, array in enumerate((arena.array, arena.scratch)):
        array[:] = np.random.default_rng(seed).integers(0, 127, array.shape)
    arrays = {"arena": arena.array, "scratch": arena.scratch}
    wanted = {place: array.copy() for place, array in arrays.items()}
    wanted[places[1]][:, dst : dst + rows] = arrays[places[0]][:, src : src + rows].copy()
    arena.execute(Move(src, dst, rows, *places))
    assert np.array_equal(arena.array, wanted["arena"])
    assert np.array_equal(arena.scratch, wanted["scratch"])
    assert arena.bytes_copied == rows * geometry.tensors * geometry.row_bytes
    assert arena.copies == 1


@pytest.mark.parametrize(("src", "dst"), [(1, 0), (0, 1), (500, 0), (1000, 0)])
def test_a_move_needs_no_second_cache(src, dst):
    geometry = RowSpec(layers=4, kv_heads=4, head_dim=64, window=1001)
    arena = RowArena(Layout(geometry, 2000))
    tracemalloc.start()
    arena.execute(Move(src, dst, 1000))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < arena.bytes_held / 100


@pytest.mark.parametrize(
    "move", [Move(0, 3, 2), Move(3, 0, 2), Move(0, 0, 2, src="scratch"), Move(3, 2, 2), Move(-1, 0, 1), Move(0, -1, 1)]
)
def test_a_move_of_rows_that_are_not_there_is_refused_before_a_byte_is_copied(move):
    arena = RowArena(Layout(RowSpec(layers=1, kv_heads=1, head_dim=2, window=4), 4, 1))
    arena.array[:] = np.arange(16, dtype=np.uint8).reshape(2, 4, 2)
    before = arena.array.copy()
    with pytest.raises(ValueError, match="move: got"):
        arena.execute(move)
    assert np.array_equal(arena.array, before)
    assert arena.bytes_copied == arena.copies == 0


def test_the_layout_tells_the_bytes_of_a_strategy_without_allocating_them():
    geometry = RowSpec(layers=32, kv_heads=32, head_dim=128, window=2048, kv_dtype="s16")
    strip = Layout.of(geometry, PointerShift(geometry, 2, max_ar=32))
    assert strip.stride_bytes == (2 * 2047 + 32) * 256
    assert strip.allocated_bytes == 2048 * (2 * 2047 + 32) * 256 + 64
    slot = Layout.of(geometry, Slot(geometry, max_ar=32))
    assert slot.allocated_bytes == 2048 * (2048 + 32) * 256 + 64


def test_strides_are_whole_rows_and_whole_boundaries():
    layout = Layout(RowSpec(layers=1, kv_heads=1, head_dim=10, window=8), 7, 1)
    assert (layout.stride_bytes, layout.scratch_stride_bytes, layout.scratch_offset_bytes) == (320, 64, 640)


@pytest.mark.parametrize("rows", [(0, 0), (1, -1)])
def test_a_layout_needs_rows(rows):
    with pytest.raises(ValueError, match="layout: got"):
        Layout(RowSpec(layers=1, kv_heads=1, head_dim=2, window=4), *rows)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.sampled_from(["uint8", "int32"]))
def test_arrays_for_runtimes_are_zeros_on_a_64_byte_boundary(shape, dtype):
    found = aligned_zeros(shape, dtype)
    assert (found.shape, found.dtype, found.ctypes.data % 64) == (tuple(shape), dtype, 0) and not found.any()
