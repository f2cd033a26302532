"""Keys as columns: what they hold and what they copy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgekv.kv import ColumnArena, ColumnLayout, KVCache, Move, PointerShift, RowSpec, ShiftConcat, Slot
from tests.support.kv_graph import feed, geometry_of, held

GEOMETRY = RowSpec(layers=2, kv_heads=2, head_dim=8, window=65, key_layout="columns")
ROW_BYTES = GEOMETRY.tensors * GEOMETRY.row_bytes


@given(context=st.integers(2, 3000), head_dim=st.integers(1, 256))
def test_a_pointer_shift_of_reserve_2_needs_a_strip_of_d_plus_1_pasts(context, head_dim):
    geometry = RowSpec(1, 1, head_dim, context, key_layout="columns")
    overhang = 1
    layout = ColumnLayout.of(geometry, PointerShift(geometry, 2, max_ar=1), [1])
    assert layout.strip_elements == (head_dim + 1) * (context - 1) + overhang


def test_fixed_strips_need_d_pasts():
    for strategy in (Slot(GEOMETRY, max_ar=1), ShiftConcat(GEOMETRY, max_ar=1)):
        assert ColumnLayout.of(GEOMETRY, strategy, [1]).strip_elements == 8 * 64 + 1


def test_a_step_is_bound_as_columns():
    cache = KVCache(GEOMETRY, ar=[1, 8], strategy="pointer-shift")
    keys, values = cache.arenas
    (window,) = cache.window(8)
    assert (keys.past_shape(57), keys.new_shape(8)) == ([1, 1, 8, 57], [1, 1, 8, 8])
    assert (values.past_shape(57), values.new_shape(8)) == ([1, 1, 57, 8], [1, 1, 8, 8])
    assert {tensor.kind for tensor in keys.tensors} == {"key"}
    assert {tensor.kind for tensor in values.tensors} == {"value"}
    assert (keys.past_offset_bytes(window), values.past_offset_bytes(window)) == (7, 7 * 8)
    assert all(address % 64 == 0 for address in keys.addresses + keys.new_addresses(window))


@pytest.mark.parametrize("strategy", ["pointer-shift", "slot"])
def test_a_token_costs_its_keys_scattered_elements_and_no_more(strategy):
    cache = KVCache(GEOMETRY, ar=[1], strategy=strategy)
    for token in range(1, 65):
        cache.window(1)
        cache.commit(1)
        assert cache.arenas[0].bytes_copied == token * ROW_BYTES // 2
    assert cache.arenas[1].bytes_copied == (0 if strategy == "pointer-shift" else 64 * ROW_BYTES // 2)


def test_a_window_slides_by_one_element_until_the_reserve_is_used_up():
    cache = KVCache(GEOMETRY, ar=[1], strategy="pointer-shift", policy="sliding-window")
    for _ in range(65 + 65):
        cache.window(1)
        cache.commit(1)
    assert cache.stats.copies == 130 + 2
    assert cache.arenas[0].bytes_copied == (130 + 64) * ROW_BYTES // 2


def test_a_graph_of_another_ar_costs_one_rewrite_of_the_keys_held():
    cache = KVCache(GEOMETRY, ar=[1, 8], strategy="pointer-shift")
    for _ in range(5):
        cache.window(8)
        cache.commit(8)
    before = cache.stats.bytes_copied
    cache.window(1)
    assert cache.stats.bytes_copied - before == 40 * ROW_BYTES // 2
    cache.commit(1)
    cache.window(1)
    assert cache.stats.bytes_copied - before == (40 + 1) * ROW_BYTES // 2


@pytest.mark.parametrize("strategy", ["pointer-shift", "slot", "shift-concat"])
def test_a_graph_that_sees_less_than_is_held_loses_nothing(strategy):
    cache = KVCache(geometry_of(20, key_layout="columns"), ar=[1, 8], strategy=strategy, policy="sliding-window")
    for token in range(40):
        feed(cache, 1, [token])
    assert sorted(feed(cache, 8, [40])) == list(range(28, 40))
    assert held(cache) == list(range(22, 41))
    assert sorted(feed(cache, 1, [41])) == list(range(22, 41))


@pytest.mark.parametrize(
    "move", [Move(0, 0, 1, dst="scratch"), Move(0, 100, 90), Move(0, 0, 2, src="scratch"), Move(0, -1, 1)]
)
def test_a_move_of_columns_that_are_not_there_is_refused_before_a_byte_is_copied(move):
    arena = ColumnArena(ColumnLayout.of(GEOMETRY, PointerShift(GEOMETRY, 2, max_ar=1), [1]))
    before = arena.read(0, range(129)).copy()
    with pytest.raises(ValueError, match="move: got"):
        arena.execute(move)
    assert np.array_equal(arena.read(0, range(129)), before)
    assert arena.bytes_copied == arena.copies == 0
