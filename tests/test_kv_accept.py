"""Steps whose first rows alone are kept: a pass of drafts, of which some are wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv.kv import STRATEGIES, KVCache
from tests.kv_graph import Graph, geometry_of, held

CONTEXT = 40
AR = (1, 4, 8)
STEPS = st.lists(st.tuples(st.sampled_from(AR), st.integers(0, 8), st.integers(0, 3)), max_size=30)


def run_pass(cache: KVCache, ar: int, kept: int, first: int) -> list[int]:
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
@given(steps=STEPS)
def test_a_cache_holds_what_a_list_holds(strategy: str, key_layout: str, policy: str, steps: list[tuple[int, ...]]):
    if (strategy, key_layout) == ("mirror", "columns"):
        return  # refused when it is made
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
