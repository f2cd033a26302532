"""The cache against a naive list of tokens, with a stand-in for the graph that only sees addresses."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from edgekv.errors import ContextFullError, UsageError
from edgekv.kv import DEFAULT_STRATEGY, STRATEGIES, KVCache, PointerShift, RowSpec, make_strategy
from tests.support.kv_graph import Graph, feed, geometry_of, held, image
from tests.support.thorough import at_most


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, list[int], list[tuple[str, int, int]]]:
    """A context, the AR of its graphs, and what happens to the cache."""
    context = draw(st.integers(2, 20))
    ar = draw(st.lists(st.integers(1, context - 1), min_size=1, max_size=3, unique=True))
    steps = st.tuples(st.just("step"), st.sampled_from(ar), st.integers(0, context))
    rewinds = st.tuples(st.just("rewind"), st.integers(0, context), st.just(0))
    resets = st.just(("reset", 0, 0))
    events = st.one_of(steps, steps, steps, steps, rewinds, resets)
    return context, ar, draw(st.lists(events, min_size=10, max_size=60))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fail", "sliding-window"])
@pytest.mark.parametrize(
    ("strategy", "reserve"),
    [
        ("pointer-shift", 2.0),
        ("pointer-shift", Fraction(3, 2)),
        ("pointer-shift", 1.25),
        ("pointer-shift", 1.1),
        ("slot", 2),
        ("mirror", 2),
        ("shift-concat", 2),
        ("columns pointer-shift", 2.0),
        ("columns pointer-shift", 1.25),
        ("columns slot", 2),
        ("columns mirror", 2),
        ("columns shift-concat", 2),
    ],
)
@at_most(40)
@given(schedule=schedules(), kv_dtype=st.sampled_from(["u8", "s16"]))
@example(
    schedule=(8, [1, 3], [("step", 3, 3)] * 4 + [("rewind", 5, 0), ("step", 1, 1), ("step", 3, 2), ("step", 3, 3)]),
    kv_dtype="u8",
)
def test_every_schedule_agrees_with_a_list(strategy, reserve, policy, schedule, kv_dtype):
    context, ar, events = schedule
    key_layout = "columns" if strategy.startswith("columns") else "rows"
    strategy = strategy.split()[-1]
    # Rows of half a page: a ring of few rows, which the head goes round many times.
    row_bytes = 2048 if strategy == "mirror" else 8
    geometry = geometry_of(context, kv_dtype, key_layout=key_layout, row_bytes=row_bytes)
    cache = KVCache(geometry, ar=ar, strategy=strategy, reserve=reserve, policy=policy)
    wanted: list[int] = []
    position, serial = 0, 0

    for event, size, fill in events:
        if event == "step":
            room = policy == "sliding-window" or len(wanted) <= context - size
            assert cache.room(size) == room
            if not room:
                before = image(cache)
                with pytest.raises(ContextFullError):
                    cache.window(size)
                assert image(cache) == before
                continue
            tokens = list(range(serial, serial + min(fill, size)))
            past = feed(cache, size, tokens)
            visible = wanted[max(0, len(wanted) - (context - size)) :]
            assert (sorted(past) if strategy == "slot" else past) == visible
            wanted += tokens
            if policy == "sliding-window":
                wanted = wanted[max(0, len(wanted) - (context - 1)) :]
            position += len(tokens)
            serial += len(tokens)
        elif event == "rewind":
            dropped = min(size, len(wanted))
            cache.rewind(dropped)
            wanted = wanted[: len(wanted) - dropped]
            position -= dropped
        else:
            cache.reset()
            wanted, position = [], 0

        assert cache.length == len(wanted)
        assert cache.tokens_seen == position
        assert held(cache) == wanted


SMALL = RowSpec(layers=1, kv_heads=1, head_dim=8, window=8)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_whole_context_can_be_computed_and_no_token_more(strategy):
    cache = KVCache(SMALL, ar=[1, 4], strategy=strategy)
    feed(cache, 4, [0, 1, 2, 3])
    feed(cache, 4, [4, 5, 6])
    assert not cache.room(4)
    assert sorted(feed(cache, 1, [7])) == [0, 1, 2, 3, 4, 5, 6]
    assert cache.length == cache.tokens_seen == 8
    with pytest.raises(ContextFullError, match=r"context of 8 tokens.*8 tokens held.*sliding-window.*--context"):
        cache.window(1)
    cache.rewind(2)
    assert sorted(feed(cache, 1, [8])) == [0, 1, 2, 3, 4, 5]


def test_a_full_context_names_the_graph_that_would_still_run():
    cache = KVCache(SMALL, ar=[1, 4])
    feed(cache, 4, [0, 1, 2, 3])
    feed(cache, 1, [4])
    with pytest.raises(ContextFullError, match=r"at most 4 before a step of AR-4.*at most 1 tokens per inference"):
        cache.window(4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sliding_window_keeps_the_newest_tokens_and_absolute_positions(strategy):
    cache = KVCache(SMALL, ar=[1, 4], strategy=strategy, policy="sliding-window")
    for token in range(30):
        feed(cache, 1, [token])
    assert (cache.length, cache.tokens_seen) == (7, 30)
    assert sorted(feed(cache, 1, [30])) == list(range(23, 30))
    assert sorted(feed(cache, 4, [31, 32, 33])) == [27, 28, 29, 30]
    cache.rewind(2)
    assert (cache.length, cache.tokens_seen) == (5, 32)
    assert sorted(feed(cache, 1, [34])) == [27, 28, 29, 30, 31]


@pytest.mark.parametrize("policy", ["fail", "sliding-window"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_refused_calls_change_nothing(strategy, policy):
    cache = KVCache(SMALL, ar=[1, 4], strategy=strategy, policy=policy)
    feed(cache, 4, [0, 1, 2, 3])
    (window,) = cache.window(4)
    Graph(cache).write(window, [4, 5, 6, 7])
    before = image(cache)
    for refused in (
        lambda: cache.commit(5),
        lambda: cache.commit(-1),
        lambda: cache.rewind(5),
        lambda: cache.rewind(-1),
        lambda: cache.window(0),
        lambda: cache.window(5),
        lambda: cache.room(5),
    ):
        with pytest.raises(ValueError, match=r"got .*expected"):
            refused()
        assert image(cache) == before
    cache.commit(2)
    assert sorted(feed(cache, 1, [8])) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("close", [lambda c: c.commit(1), lambda c: c.rewind(0), lambda c: c.reset()])
def test_a_commit_needs_an_open_step(close):
    cache = KVCache(SMALL, ar=[1])
    with pytest.raises(ValueError, match=r"no open step.*window\(ar\)"):
        cache.commit(1)
    cache.window(1)
    close(cache)
    with pytest.raises(ValueError, match="no open step"):
        cache.commit(1)


def test_a_refused_step_leaves_the_open_one_open():
    cache = KVCache(SMALL, ar=[1, 4])
    for token in range(5):
        feed(cache, 1, [token])
    Graph(cache).write(*cache.window(1), [5])
    with pytest.raises(ContextFullError):
        cache.window(4)
    cache.commit(1)
    assert feed(cache, 1, [6]) == [0, 1, 2, 3, 4, 5]


def test_stats_count_steps_and_tokens_and_go_on_after_a_reset():
    cache = KVCache(SMALL, ar=[1, 4], strategy="slot")
    feed(cache, 4, [0, 1, 2])
    feed(cache, 1, [3])
    cache.reset()
    feed(cache, 1, [0])
    stats = cache.stats
    assert (stats.steps, stats.tokens, stats.copies) == (3, 5, 3)
    assert stats.bytes_copied == 5 * SMALL.tensors * SMALL.row_bytes
    assert stats.bytes_held == cache.arena.bytes_held


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "paged"}, r"update strategy: got 'paged'; expected pointer-shift or slot"),
        ({"policy": "forget"}, r"context policy: got 'forget'; expected fail or sliding-window"),
        ({"reserve": 3}, r"reserve: got 3; expected a number above 1 and at most 2"),
    ],
)
def test_options_of_a_user_are_refused_by_name(options, message):
    with pytest.raises(UsageError, match=message):
        KVCache(SMALL, ar=[1], **options)


@pytest.mark.parametrize("ar", [[], [0], [8], [1, 9]])
def test_only_ar_below_the_context_is_taken(ar):
    with pytest.raises(ValueError, match="ar: got"):
        KVCache(SMALL, ar=ar)


def test_a_cache_has_the_default_strategy_unless_its_reserve_says_pointer_shift():
    assert isinstance(KVCache(SMALL, ar=[1]).groups[0].strategy, type(make_strategy(DEFAULT_STRATEGY, SMALL, max_ar=1)))
    assert isinstance(KVCache(SMALL, ar=[1], reserve=1.5).groups[0].strategy, PointerShift)


def test_unused_rows_hold_the_zero_point():
    assert np.all(KVCache(SMALL, ar=[1]).arena.array == 128)
    signed = RowSpec(layers=1, kv_heads=1, head_dim=8, window=8, kv_dtype="s16")
    assert not KVCache(signed, ar=[1]).arena.array.any()


def test_the_room_left_is_the_context_without_the_tokens_held():
    cache = KVCache(geometry_of(8), ar=(1, 3))
    feed(cache, 3, [1, 2, 3])
    assert cache.room_tokens == 5
    assert KVCache(geometry_of(8), ar=(1, 3), policy="sliding-window").room_tokens is None


def test_a_graph_that_appends_writes_the_row_behind_those_that_it_reads():
    cache = KVCache(geometry_of(12), ar=(1, 3), strategy="slot")
    assert cache.appends and not KVCache(geometry_of(12), ar=(1, 3), strategy="shift-concat").appends
    feed(cache, 3, [0, 1, 2])
    for token in range(3, 10):
        cache.window(1)
        (window,) = cache.append_in_place()
        assert (window.in_place, window.new_row) == (True, token)
        graph = Graph(cache)
        assert graph.past(window) == [*range(token)]
        graph.write(window, [token])
        cache.commit(1)
    assert held(cache) == [*range(10)]
