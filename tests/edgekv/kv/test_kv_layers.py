"""Layers that differ: which are alike, and that each group keeps what its layers attend to."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from edgekv.errors import UsageError
from edgekv.kv import STRATEGIES, KeyDiff, KVCache, LayeredGeometry, RowSpec, Sinks
from tests.support.kv_graph import row_of, rows_of, tokens
from tests.support.thorough import at_most


def test_lists_are_repeated_and_layers_that_are_alike_stand_together():
    local, wide = LayeredGeometry(6, 4096, (2,), (64,), windows=(512, 512, 4096)).groups()
    assert local == RowSpec(4, 2, 64, 512, numbers=(0, 1, 3, 4), context=4096)
    assert wide == RowSpec(2, 2, 64, 4096, numbers=(2, 5))
    assert local.context == wide.context == 4096 and local.in_context(256).window == 256
    assert [tensor.past for tensor in wide.names()][::4] == ["past_key_2_h0_in", "past_key_5_h0_in"]


def test_layers_that_are_all_alike_are_a_plain_geometry():
    assert LayeredGeometry(6, 512, (2,), (64,), windows=(9999,)).groups() == (RowSpec(6, 2, 64, 512),)
    cache = KVCache(LayeredGeometry(6, 512, (2,), (64,)), ar=[1])
    assert len(cache.window(1)) == 1
    assert cache.arena.array.shape[0] == 6 * 2 * 2


@pytest.mark.slow
@at_most(60)
@given(
    strategy=st.sampled_from(STRATEGIES),
    kv_heads=st.lists(st.integers(1, 2), min_size=1, max_size=3),
    head_dim=st.lists(st.sampled_from([8, 16]), min_size=1, max_size=3),
    windows=st.lists(st.integers(5, 14), max_size=3),
    policy=st.sampled_from(["fail", "sliding-window"]),
    steps=st.lists(st.tuples(st.sampled_from([1, 4]), st.integers(0, 4)), max_size=40),
    columns=st.booleans(),
)
def test_each_layer_sees_the_newest_tokens_of_its_window(strategy, kv_heads, head_dim, windows, policy, steps, columns):
    key_layout = "columns" if columns else "rows"
    geometry = LayeredGeometry(4, 14, kv_heads, head_dim, [*windows, 14], key_layout=key_layout)
    cache = KVCache(geometry, ar=[1, 4], strategy=strategy, policy=policy)
    count = 0
    for ar, fill in steps:
        if not cache.room(ar):
            continue
        new = list(range(count, count + min(ar, fill)))
        for group, window in zip(cache.groups, cache.window(ar), strict=True):
            wanted = list(range(count))[-min(group.geometry.window - 1, 14 - ar) :]
            for store in group.arenas:
                for tensor, base in enumerate(store.addresses):
                    address, shape = base + store.past_offset_bytes(window), store.past_shape(window.columns)
                    past = rows_of(store, tensor, address, shape)
                    assert sorted(tokens(store, tensor, past[window.first : window.stop])) == wanted
                    gone = wanted[: max(0, len(wanted) + ar - group.geometry.window)]
                    assert tokens(store, tensor, past[list(window.leaving)]) == gone
                for tensor, base in enumerate(store.new_addresses(window)):
                    rows = rows_of(store, tensor, base + store.new_offset_bytes(window), store.new_shape(ar))
                    for row in range(ar):
                        rows[row] = row_of(store, tensor, new[row] if row < len(new) else 9999)
        cache.commit(len(new))
        count += len(new)
    for group in cache.groups:
        capacity = 14 if group.geometry.window == 14 and policy == "fail" else group.geometry.window - 1
        assert group.length == min(count, capacity)


def test_a_rewind_stays_within_what_the_narrowest_layer_holds():
    cache = KVCache(LayeredGeometry(2, 64, (1,), (8,), windows=(8, 64)), ar=[1])
    for _ in range(20):
        cache.window(1)
        cache.commit(1)
    with pytest.raises(ValueError, match="got 8 tokens; expected 0 to 7"):
        cache.rewind(8)
    cache.rewind(7)
    assert [group.length for group in cache.groups] == [0, 13]
    assert cache.position == 13


def test_what_makes_no_cache_is_refused():
    with pytest.raises(ValueError, match="head_dim: got an empty list"):
        LayeredGeometry(2, 64, (1,), ())
    with pytest.raises(ValueError, match="ar: got 8; expected 1 to 7"):
        KVCache(LayeredGeometry(2, 64, (1,), (8,), windows=(8, 64)), ar=[8])
    with pytest.raises(ValueError, match="numbers: got"):
        RowSpec(2, 1, 8, 64, numbers=(1,))


def test_sinks_need_layers_that_attend_alike_and_keydiff_does_not():
    geometry = LayeredGeometry(2, 64, (1,), (8,), windows=(8, 64))
    with pytest.raises(UsageError, match=r"sinks: got layers that attend to 8 tokens of 64.*keydiff"):
        KVCache(geometry, ar=[1], policy=Sinks(4, 20, (1.0, 0.1, 0.01, 0.001)))
    cache = KVCache(geometry, ar=[1], policy=KeyDiff(20, 4))
    for _ in range(200):
        cache.window(1)
        cache.commit(1)
    assert [group.length for group in cache.groups] == [7, cache.length]
    assert 20 <= cache.length <= 64


def test_layers_that_are_all_narrow_hold_their_windows_while_the_context_lasts():
    geometry = LayeredGeometry(2, 64, (1,), (8,), windows=(8,))
    cache = KVCache(geometry, ar=[1])
    for _ in range(64):
        cache.window(1)
        cache.commit(1)
    assert [group.length for group in cache.groups] == [7]
    assert (cache.length, cache.room(1)) == (64, False)
    with pytest.raises(UsageError, match=r"keydiff: got layers that attend to 8 tokens of 64.*sliding-window"):
        KVCache(geometry, ar=[1], policy=KeyDiff(20, 4))


def test_used_bytes_are_those_of_rows_that_hold_a_token():
    cache = KVCache(LayeredGeometry(2, 64, (1,), (8,), windows=(8, 64)), ar=[1])
    for _ in range(20):
        cache.window(1)
        cache.commit(1)
    assert cache.used_bytes == (7 + 20) * 2 * 8
