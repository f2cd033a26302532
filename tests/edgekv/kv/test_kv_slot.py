"""The slot strategy: fixed addresses, one write a step, and the exchanges of a sliding window."""

from __future__ import annotations

import pytest

from edgekv.kv import KVCache, Move, RowSpec, Slot, Window

GEOMETRY = RowSpec(layers=2, kv_heads=2, head_dim=8, window=65, kv_dtype="s16")
ROW_BYTES = GEOMETRY.tensors * GEOMETRY.row_bytes


@pytest.mark.parametrize("policy", ["fail", "sliding-window"])
@pytest.mark.parametrize("ar", [1, 8])
def test_a_step_copies_its_rows_once_and_reads_at_row_0(ar, policy):
    cache = KVCache(GEOMETRY, ar=[ar], strategy="slot", policy=policy)
    for step in range(64 // ar):
        (window,) = cache.window(ar)
        stop = min(step * ar, 65 - ar)
        assert window == Window(ar=ar, columns=65 - ar, past_row=0, new_row=0, in_place=False, first=0, stop=stop)
        cache.commit(ar)
        if cache.length < 64:
            assert cache.stats.copies == step + 1
            assert cache.stats.bytes_copied == (step + 1) * ar * ROW_BYTES


def test_only_committed_rows_are_copied():
    cache = KVCache(GEOMETRY, ar=[8], strategy="slot")
    cache.window(8)
    cache.commit(3)
    assert cache.stats.bytes_copied == 3 * ROW_BYTES
    cache.window(8)
    cache.commit(0)
    assert cache.stats.bytes_copied == 3 * ROW_BYTES


def test_single_tokens_go_round_in_a_ring_with_one_write_each():
    cache = KVCache(GEOMETRY, ar=[1, 8], strategy="slot", policy="sliding-window")
    for _ in range(500):
        cache.window(1)
        cache.commit(1)
    assert cache.stats.copies == 500
    assert cache.stats.bytes_copied == 500 * ROW_BYTES
    assert cache.held_rows()[-1] == 499 % 64


def test_a_chunk_behind_a_full_window_first_swaps_the_oldest_out_of_sight():
    slot = Slot(GEOMETRY, max_ar=8)
    slot.commit(64, 0)
    assert slot.prepare(8, 57) == (
        Move(0, 0, 7, dst="scratch"),
        Move(57, 0, 7),
        Move(0, 57, 7, src="scratch"),
    )
    assert slot.held_rows()[:7] == list(range(57, 64))
    assert slot.prepare(8, 57) == ()
    assert slot.prepare(1, 64) == ()


def test_a_rewind_copies_nothing_before_the_window_slides():
    slot = Slot(GEOMETRY, max_ar=8)
    slot.commit(64, 0)
    assert slot.rewind(10) == ()
    assert slot.held_rows() == list(range(54))


def test_a_rewind_after_the_ring_closed_fills_the_rows_it_frees():
    slot = Slot(GEOMETRY, max_ar=8)
    slot.commit(64, 0)
    slot.commit(3, 3)
    assert slot.rewind(2) == [Move(62, 1, 2)]
    assert slot.held_rows() == [*range(3, 62), 1, 2, 0]


def test_rows_that_a_rewind_scattered_are_written_together_again():
    slot = Slot(GEOMETRY, max_ar=8)
    slot.commit(64, 0)
    slot.commit(3, 3)
    slot.rewind(2)
    slot.commit(2, 0)
    slot.commit(59, 59)
    assert slot.held_rows()[:3] == [1, 2, 0]
    assert slot.commit(3, 3) == [Move(0, 0, 3, src="scratch")]


def test_memory_is_one_context_and_a_scratch_of_one_step():
    slot = Slot(GEOMETRY, max_ar=8)
    assert (slot.rows, slot.scratch_rows) == (65, 8)
