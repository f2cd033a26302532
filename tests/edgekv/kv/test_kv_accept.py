"""Steps whose first rows alone are kept: a pass of drafts, of which some are wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from edgekv.kv import STRATEGIES, KVCache
from tests.support.kv_graph import Graph, geometry_of, held
from tests.support.thorough import at_most

CONTEXT = 40
AR = (1, 4, 8)
STEPS = st.lists(st.tuples(st.sampled_from(AR), st.integers(0, 8), st.integers(0, 3)), max_size=30)


def run_pass(cache: KVCache, ar: int, kept: int | list[int], first: int) -> list[int]:
    """Run a full step of the tokens `first`, `first` + 1, ... and keep some; return what it saw."""
    (window,) = cache.window(ar)
    graph = Graph(cache)
    past = graph.past(window)
    graph.write(window, [*range(first, first + ar)])
    cache.commit(kept)
    return past


@pytest.mark.parametrize("policy", ["fail", "sliding-window"])
@pytest.mark.parametrize("key_layout", ["rows", "columns"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@at_most(30)
@given(steps=STEPS)
def test_a_cache_holds_what_a_list_holds(strategy: str, key_layout: str, policy: str, steps: list[tuple[int, ...]]):
    row_bytes = 4096 if strategy == "mirror" else 8
    geometry = replace(geometry_of(CONTEXT, row_bytes=row_bytes), key_layout=key_layout)
    cache = KVCache(geometry, ar=AR, strategy=strategy, policy=policy)
    text: list[int] = []
    most, can_drop = cache.capacity, 0
    for number, (ar, kept, rewound) in enumerate(steps):
        if not cache.room(ar):
            continue
        kept = min(kept, ar)
        past = run_pass(cache, ar, kept, 100 * number)
        seen = text[-min(len(text), CONTEXT - ar) :] if text else []
        assert sorted(past) == sorted(seen)
        text = [*text, *range(100 * number, 100 * number + kept)][-most:]
        can_drop = min(can_drop + kept, len(text))
        if dropped := min(rewound, can_drop):
            cache.rewind(dropped)
            del text[-dropped:]
            can_drop -= dropped
        assert held(cache) == text and cache.length == len(text)


@pytest.mark.parametrize("strategy", ["pointer-shift", "mirror"])
def test_accepted_drafts_are_not_copied(strategy: str) -> None:
    cache = KVCache(geometry_of(CONTEXT, row_bytes=4096), ar=AR, strategy=strategy)
    for kept in (1, 5, 0, 8, 3):
        run_pass(cache, 8, kept, 0)
    assert cache.stats.bytes_copied == 0 and cache.length == 17


def test_slot_writes_accepted_drafts_at_once() -> None:
    cache = KVCache(geometry_of(CONTEXT), ar=AR, strategy="slot")
    for kept in (1, 5, 8, 3):
        before = cache.stats
        run_pass(cache, 8, kept, 0)
        copied = cache.stats.bytes_copied - before.bytes_copied
        assert (cache.stats.copies - before.copies, copied) == (1, kept * 4 * 8)


PATHS = st.lists(st.tuples(st.sampled_from(AR), st.sets(st.integers(0, 7))), max_size=20)


@pytest.mark.parametrize("policy", ["fail", "sliding-window"])
@pytest.mark.parametrize("key_layout", ["rows", "columns"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@at_most(30)
@given(paths=PATHS)
def test_a_path_of_a_tree_is_what_a_list_holds(
    strategy: str, key_layout: str, policy: str, paths: list[tuple[int, set[int]]]
) -> None:
    geometry = geometry_of(CONTEXT, row_bytes=4096 if strategy == "mirror" else 8)
    cache = KVCache(replace(geometry, key_layout=key_layout), ar=AR, strategy=strategy, policy=policy)
    text: list[int] = []
    for number, (ar, chosen) in enumerate(paths):
        if not cache.room(ar):
            continue
        path = sorted(row for row in chosen if row < ar)
        past = run_pass(cache, ar, path, 100 * number)
        assert sorted(past) == sorted(text[-min(len(text), CONTEXT - ar) :] if text else [])
        text = [*text, *(100 * number + row for row in path)][-cache.capacity :]
        assert held(cache) == text and cache.tokens_seen >= cache.length == len(text)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_rows_behind_a_gap_are_compacted(strategy: str) -> None:
    def copied(kept: int | list[int]) -> tuple[int, int]:
        cache = KVCache(geometry_of(CONTEXT, row_bytes=4096), ar=AR, strategy=strategy)
        run_pass(cache, 8, kept, 0)
        return cache.stats.copies, cache.stats.bytes_copied

    (copies, size), (more, larger) = copied(4), copied([0, 1, 4, 6])
    assert (more, larger) == (copies + 1, size + 2 * 4 * 4096)  # once, two rows of four tensors
    assert copied([0, 1, 2, 3]) == (copies, size)


@pytest.mark.parametrize("kept", [[1, 0], [0, 0], [0, 4], [-1]])
def test_rows_that_a_step_does_not_have_in_order_are_refused(kept: list[int]) -> None:
    cache = KVCache(geometry_of(CONTEXT), ar=AR)
    cache.window(4)
    with pytest.raises(ValueError, match="expected ascending ones below 4"):
        cache.commit(kept)
    cache.commit([])
    assert cache.length == 0
