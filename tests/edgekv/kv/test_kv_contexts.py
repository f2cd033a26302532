"""Graphs of several contexts on one cache: what each sees, and what it costs to move up."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from edgekv.kv import STRATEGIES, KVCache
from tests.support.kv_graph import ROW_BYTES, feed, geometry_of, held
from tests.support.thorough import at_most

CONTEXTS = (8, 16, 32)
TENSORS = 4


def make(strategy: str, key_layout: str = "rows", policy: str = "fail") -> KVCache:
    return KVCache(geometry_of(CONTEXTS[-1], key_layout=key_layout), ar=[1, 4], strategy=strategy, policy=policy)


def context_of(cache: KVCache, ar: int) -> int:
    return next((context for context in CONTEXTS if cache.length + ar <= context), CONTEXTS[-1])


@pytest.mark.parametrize("key_layout", ["rows", "columns"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@at_most(60)
@given(
    policy=st.sampled_from(["fail", "sliding-window"]),
    events=st.lists(
        st.one_of(
            st.tuples(st.just("step"), st.sampled_from([1, 4]), st.integers(0, 4)),
            st.tuples(st.just("rewind"), st.integers(0, 20), st.just(0)),
            st.tuples(st.just("reset"), st.just(0), st.just(0)),
        ),
        max_size=60,
    ),
)
def test_every_graph_sees_what_the_largest_would_see(strategy, key_layout, policy, events):
    cache, wanted, serial = make(strategy, key_layout, policy), [], 0
    for event, size, fill in events:
        if event == "step" and cache.room(size):
            tokens = list(range(serial, serial + min(size, fill)))
            past = feed(cache, size, tokens, context_of(cache, size))
            assert sorted(past) == wanted[max(0, len(wanted) - (CONTEXTS[-1] - size)) :]
            wanted += tokens
            serial += len(tokens)
            if policy == "sliding-window":
                wanted = wanted[max(0, len(wanted) - (CONTEXTS[-1] - 1)) :]
        elif event == "rewind":
            count = min(size, cache.length)
            cache.rewind(count)
            wanted = wanted[: len(wanted) - count]
        elif event == "reset":
            cache.reset()
            wanted = []
        assert held(cache) == wanted


@pytest.mark.parametrize(
    ("strategy", "key_layout", "rows"),
    [
        # Nothing; or just the new rows, as in every step.
        ("pointer-shift", "rows", 0),
        ("mirror", "rows", 0),
        ("slot", "rows", 1),
        # The past that the graph of 16 sees, 14 rows of it, and the new one.
        ("shift-concat", "rows", 14 + 1),
        # The distance of the dimensions changes: the 8 keys held are written anew, and the new one behind them.
        ("pointer-shift", "columns", (8 + 1) / 2),
        ("slot", "columns", (8 + 1) / 2 + 1 / 2),
        ("mirror", "columns", (8 + 1) / 2),
    ],
)
def test_what_moving_up_copies(strategy, key_layout, rows):
    cache = make(strategy, key_layout)
    for token in range(8):
        feed(cache, 1, [token], 8)
    before = cache.stats.bytes_copied
    feed(cache, 1, [8], 16)
    assert cache.stats.bytes_copied - before == rows * TENSORS * ROW_BYTES


def test_a_context_without_room_is_refused():
    cache = make("slot")
    for token in range(8):
        feed(cache, 1, [token])
    for context in (8, 33):
        with pytest.raises(ValueError, match=f"context: got {context}; expected 9, tokens held and new, to 32"):
            cache.window(1, context)
    assert held(cache) == list(range(8))
