"""What the pointer shift costs, in rows and in copied bytes: the figures of the HTP note."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given, strategies as st

from edgekv.errors import UsageError
from edgekv.kv import KVCache, PointerShift, RowSpec, Window, parse_reserve

GEOMETRY = RowSpec(layers=2, kv_heads=2, head_dim=8, window=65)
ROW_BYTES = GEOMETRY.tensors * GEOMETRY.row_bytes


def run(cache: KVCache, tokens: int, ar: int = 1) -> None:
    for _ in range(tokens // ar):
        cache.window(ar)
        cache.commit(ar)


def test_rows_are_the_reserve_and_an_overhang_of_one_step():
    assert PointerShift(GEOMETRY, 2, max_ar=32).rows == 2 * 64 + 32
    assert PointerShift(GEOMETRY, 1.5, max_ar=1).rows == 96 + 1
    assert PointerShift(GEOMETRY, Fraction(4, 3), max_ar=1).rows == 86 + 1


def test_the_window_ends_at_the_head_and_the_new_rows_follow():
    strip = PointerShift(GEOMETRY, 2, max_ar=4)
    assert strip.window(4, 61) == Window(ar=4, columns=61, past_row=3, new_row=64, in_place=True, first=61, stop=61)
    strip.commit(3, 0)
    assert strip.window(1, 64) == Window(ar=1, columns=64, past_row=3, new_row=67, in_place=True, first=61, stop=64)


@pytest.mark.parametrize("policy", ["fail", "sliding-window"])
@given(chunks=st.lists(st.tuples(st.sampled_from([1, 8, 32]), st.integers(1, 32)), max_size=80))
def test_the_first_tokens_copy_no_byte_at_reserve_2(policy, chunks):
    cache = KVCache(GEOMETRY, ar=[1, 8, 32], strategy="pointer-shift", policy=policy)
    for ar, fill in chunks:
        tokens = min(ar, fill, 64 - cache.tokens_seen)
        if tokens and cache.room(ar):
            cache.window(ar)
            cache.commit(tokens)
    while cache.tokens_seen < 64:
        cache.window(1)
        cache.commit(1)
    assert cache.stats.bytes_copied == cache.stats.copies == 0


@pytest.mark.parametrize(("reserve", "tokens_per_slide"), [(2.0, 64), (1.5, 32), (1.25, 16)])
def test_a_sliding_window_copies_s_minus_1_rows_per_reserve_used_up(reserve, tokens_per_slide):
    cache = KVCache(GEOMETRY, ar=[1], reserve=reserve, policy="sliding-window")
    run(cache, 64)
    before = cache.stats
    run(cache, 100 * tokens_per_slide)
    slides = cache.stats.copies - before.copies
    # The overhang of one row makes the period one token longer.
    assert slides in (
        100 * tokens_per_slide // (tokens_per_slide + 1),
        100 * tokens_per_slide // (tokens_per_slide + 1) + 1,
    )
    assert cache.stats.bytes_copied - before.bytes_copied == slides * 64 * ROW_BYTES


def test_a_slide_moves_only_the_tokens_held():
    cache = KVCache(GEOMETRY, ar=[1], reserve=1.25)
    run(cache, 17)
    assert cache.stats.copies == 0
    cache.window(1)
    assert cache.stats.copies == 1
    assert cache.stats.bytes_copied == 17 * ROW_BYTES


def test_a_rewind_copies_nothing_unless_it_crosses_a_slide():
    cache = KVCache(GEOMETRY, ar=[1], reserve=1.5, policy="sliding-window")
    run(cache, 30)
    cache.rewind(20)
    cache.window(1)
    assert cache.stats.copies == 0
    run(cache, 24)
    assert (cache.length, cache.stats.copies) == (34, 1)
    cache.rewind(10)
    cache.window(1)
    assert cache.stats.bytes_copied == (33 + 24) * ROW_BYTES


def test_a_cache_rewound_to_its_start_is_as_good_as_new():
    cache = KVCache(GEOMETRY, ar=[1], reserve=1.25)
    run(cache, 30)
    cache.rewind(30)
    before = cache.stats.copies
    assert cache.window(1) == (PointerShift(GEOMETRY, 1.25, max_ar=1).window(1, 64),)
    assert cache.stats.copies == before


@given(
    reserve=st.fractions(min_value=1, max_value=2, max_denominator=50).filter(lambda ratio: ratio > 1),
    context=st.integers(2, 200),
    max_ar=st.integers(1, 199),
)
def test_any_reserve_makes_room_for_a_step_after_a_slide(reserve, context, max_ar):
    geometry = RowSpec(layers=1, kv_heads=1, head_dim=1, window=context)
    rows = PointerShift(geometry, reserve, max_ar=max_ar).rows
    assert rows == ceil(reserve * (context - 1)) + max_ar
    assert rows > context - 1 + max_ar


@pytest.mark.parametrize(("given", "exact"), [(2, Fraction(2)), (1.1, Fraction(11, 10)), ("3/2", Fraction(3, 2))])
def test_a_reserve_means_the_decimal_that_was_written(given, exact):
    assert parse_reserve(given) == exact


@pytest.mark.parametrize("reserve", [1, 1.0, 2.01, 0, -1.5, float("nan"), float("inf"), "much", "1/0"])
def test_other_reserves_are_refused(reserve):
    with pytest.raises(UsageError, match=r"reserve: got .* expected a number above 1 and at most 2"):
        parse_reserve(reserve)
