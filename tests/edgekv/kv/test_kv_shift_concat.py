"""The baseline: the whole past moves in every step."""

from __future__ import annotations

import pytest

from edgekv.kv import KVCache, RowSpec, ShiftConcat, Window

GEOMETRY = RowSpec(layers=2, kv_heads=2, head_dim=8, window=65)


@pytest.mark.parametrize("policy", ["fail", "sliding-window"])
@pytest.mark.parametrize("ar", [1, 8])
def test_a_step_copies_the_whole_past_full_or_empty(ar, policy):
    cache = KVCache(GEOMETRY, ar=[ar], strategy="shift-concat", policy=policy)
    for step in range(1, 50 // ar):
        cache.window(ar)
        cache.commit(ar)
        assert cache.stats.bytes_copied == step * (65 - ar) * GEOMETRY.tensors * GEOMETRY.row_bytes


def test_the_past_is_read_at_one_place():
    strip = ShiftConcat(GEOMETRY, max_ar=8)
    assert (strip.rows, strip.scratch_rows) == (65, 8)
    strip.prepare(8, 57)
    assert strip.window(8, 57) == Window(ar=8, columns=57, past_row=8, new_row=0, in_place=False, first=57, stop=57)
    strip.commit(5, 0)
    assert strip.window(8, 57) == Window(ar=8, columns=57, past_row=8, new_row=0, in_place=False, first=52, stop=57)
