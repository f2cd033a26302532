"""Memory that grows from context to context: what it holds, what it costs, and that no token is lost."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgekv.errors import UsageError
from edgekv.kv import (
    GROWTHS,
    Allocation,
    Growth,
    GrowthName,
    KeyLayout,
    KVCache,
    LayeredGeometry,
    RowSpec,
    parse_growth,
)
from edgekv.kv.policies.text import parse_policy
from edgekv.kv.rows import RowGroup
from edgekv.spec import ConvolutionStates, DeltaRule
from quant import Encoding
from tests.support.kv_graph import GARBAGE, geometry_of, held, row_of, rows_of, tokens
from tests.support.thorough import at_most

LAYERS = 32
CONTEXTS = (8, 16, 32)


def make(
    growth: GrowthName | None, strategy: str = "slot", policy: str = "fail", key_layout: KeyLayout = "rows"
) -> KVCache:
    return KVCache(
        geometry_of(CONTEXTS[-1], layers=3, key_layout=key_layout),
        ar=[1, 4],
        strategy=strategy,
        policy=policy,
        allocation=Allocation(growth and Growth(CONTEXTS, growth)),
    )


def large(growth: GrowthName, strategy: str = "slot") -> KVCache:
    return KVCache(
        RowSpec(LAYERS, 2, 64, 512), ar=[1], strategy=strategy, allocation=Allocation(Growth((128, 256, 512), growth))
    )


def min_context(cache: KVCache, ar: int) -> int:
    return next((context for context in CONTEXTS if cache.length + ar <= context), CONTEXTS[-1])


def feed(cache: KVCache, ar: int, numbers: list[int]) -> list[int]:
    """One step of the graph of the least context; returns the tokens that it saw, the same in every tensor."""
    seen = set()
    for group, window in zip(cache.groups, cache.window(ar, min_context(cache, ar)), strict=True):
        for store in group.arenas:
            for tensor, base in enumerate(store.addresses):
                past = rows_of(store, tensor, base + store.past_offset_bytes(window), store.past_shape(window.columns))
                seen.add((window.first, window.stop, *tokens(store, tensor, past[window.first : window.stop])))
            for tensor, base in enumerate(store.new_addresses(window)):
                new = rows_of(store, tensor, base + store.new_offset_bytes(window), store.new_shape(ar))
                for row in range(ar):
                    new[row] = row_of(store, tensor, numbers[row] if row < len(numbers) else GARBAGE)
    cache.commit(len(numbers))
    ((_, _, *past_tokens),) = seen
    return past_tokens


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.sampled_from([1, 4]), st.integers(0, 4)),
        st.tuples(st.just("rewind"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("expect"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("reset"), st.just(0), st.just(0)),
        st.tuples(st.just("restore"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@pytest.mark.slow
@pytest.mark.parametrize("key_layout", ["rows", "columns"])
@pytest.mark.parametrize("strategy", ["slot", "pointer-shift"])
@at_most(40)
@given(growth=st.sampled_from(GROWTHS), policy=st.sampled_from(["fail", "sliding-window", "keydiff(9)"]), events=EVENTS)
def test_every_step_sees_what_it_would_in_a_cache_made_for_all_tokens(strategy, key_layout, growth, policy, events):
    of_all = strategy, parse_policy(policy, ()), key_layout
    cache, fixed, serial = make(growth, *of_all), make(None, *of_all), 0
    for event, size, fill in events:
        if event == "step" and cache.room(size):
            numbers = list(range(serial, serial + min(size, fill)))
            serial += len(numbers)
            assert sorted(feed(cache, size, numbers)) == sorted(feed(fixed, size, numbers))
        elif event == "rewind":
            # What may be rewound, a policy decides: the same for both.
            for each in (cache, fixed):
                each.rewind(min(size, each._positions.rewindable, each.length))
        elif event == "expect":
            cache.expect(size)
        elif event == "reset":
            cache.reset()
            fixed.reset()
        elif event == "restore":
            state = cache.state
            cache, fixed = make(growth, *of_all), make(None, *of_all)
            cache.restore(state)
            fixed.restore(state)
        # Rows are where each layer's own strategy says.
        assert {name: rows.tobytes() for name, rows in cache.state.rows.items()} == {
            name: rows.tobytes() for name, rows in fixed.state.rows.items()
        }
        assert cache.positions == fixed.positions
        assert cache.stats.bytes_held <= cache.stats.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["slot", "pointer-shift"])
def test_the_staggered_peak_excess_is_a_layer_instead_of_all(strategy):
    """Of 32 layers, over what lives at the end: at most an eighth is promised."""
    excess, peaks = {}, {}
    for growth in GROWTHS:
        cache = large(growth, strategy)
        for _ in range(512):
            cache.window(1, next(c for c in (128, 256, 512) if cache.length + 1 <= c))
            cache.commit(1)
        stats = cache.stats
        excess[growth], peaks[growth] = stats.peak_bytes - stats.bytes_held, stats.peak_bytes
        assert stats.reallocations == 2 * LAYERS
    assert 0 < 8 * excess["staggered"] <= excess["together"]
    assert excess["together"] == LAYERS * excess["staggered"]
    assert peaks["staggered"] < peaks["together"]


def test_no_two_layers_grow_at_the_same_token():
    grown = {"staggered": [], "together": []}
    for growth, steps in grown.items():
        cache = large(growth)
        for _ in range(512):
            before = cache.stats.reallocations
            cache.window(1, next(c for c in (128, 256, 512) if cache.length + 1 <= c))
            cache.commit(1)
            steps.append(cache.stats.reallocations - before)
    assert max(grown["staggered"]) == 1 and sum(grown["staggered"]) == 2 * LAYERS
    assert {token: layers for token, layers in enumerate(grown["together"]) if layers} == {128: LAYERS, 256: LAYERS}


@given(st.integers(1, 40), st.lists(st.integers(0, 60), min_size=1, max_size=3))
def test_layers_take_turns_for_any_number_of_them(layers, gaps):
    contexts = tuple(np.cumsum([max(2, layers) + gap for gap in gaps] + [max(2, layers)]).tolist())
    growth = Growth(contexts)
    growth.check([RowSpec(layers, 1, 8, contexts[-1])], contexts[-1], 1, "slot")
    for columns in range(1, contexts[-1]):
        now, after = growth.contexts_of(layers, columns), growth.contexts_of(layers, columns + 1)
        assert sum(a != b for a, b in zip(now, after, strict=True)) <= 1
        assert min(now) >= columns


def test_what_grows_is_copied_once_and_counted():
    """Layers 0, 1 and 2 move up at 3, 6 and 8 tokens held; a pointer-shift copies nothing else."""
    cache = make("staggered", "pointer-shift")
    copied = []
    for token in range(10):
        before = cache.stats.bytes_copied
        feed(cache, 1, [token])
        copied.append((cache.stats.bytes_copied - before) // (4 * cache.geometry.row_bytes))
    assert copied == [0, 0, 0, 3, 0, 0, 6, 0, 8, 0]


def test_the_outgrown_memory_lives_until_the_step_ends():
    cache = make("together")
    for token in range(8):
        feed(cache, 1, [token])
    before = cache.stats.bytes_held
    cache.window(1, 16)
    during = cache.stats.bytes_held
    cache.commit(1)
    assert before < cache.stats.bytes_held == during - before
    assert cache.stats.peak_bytes == during


def test_the_process_really_allocates_what_is_counted():
    """Against the interpreter's own count of what numpy allocates, Python's objects included."""
    for growth in GROWTHS:
        tracemalloc.start()
        cache = large(growth, "pointer-shift")
        for _ in range(300):
            cache.window(1, next(c for c in (128, 256, 512) if cache.length + 1 <= c))
            cache.commit(1)
        now, traced = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert cache.stats.peak_bytes <= traced < cache.stats.peak_bytes * 1.1
        assert cache.stats.bytes_held <= now < cache.stats.bytes_held * 1.1


def test_a_prompt_finds_its_memory_without_a_copy():
    cache = make("staggered")
    cache.expect(20)
    before = cache.stats.reallocations
    for token in range(0, 20, 4):
        feed(cache, 4, list(range(token, token + 4)))
    assert cache.stats.reallocations == before
    assert cache.stats.bytes_copied == 20 * cache.geometry.tensors * cache.geometry.row_bytes


def test_reset_keeps_the_memory_for_the_next_text():
    cache = make("together")
    for token in range(9):
        feed(cache, 1, [token])
    before = cache.stats
    cache.reset()
    feed(cache, 1, [7])
    assert (cache.stats.bytes_held, cache.stats.reallocations) == (before.bytes_held, before.reallocations)
    assert held(cache) == [7]


def test_layers_with_a_window_of_their_own_stay_as_they_are():
    geometry = LayeredGeometry(4, 32, (1,), (8,), windows=(6, None))
    cache = KVCache(geometry, ar=[1], strategy="slot", allocation=Allocation(Growth(CONTEXTS)))
    assert [group.geometry.numbers for group in cache.groups] == [(0, 2), (1,), (3,)]
    for _ in range(32):
        cache.window(1, min_context(cache, 1))
        cache.commit(1)
    assert [group.reallocations for group in cache.groups] == [0, 2, 2]


@pytest.mark.parametrize(
    ("strategy", "contexts", "message"),
    [
        ("mirror", CONTEXTS, "got mirror; expected the update strategy slot or pointer-shift"),
        ("shift-concat", CONTEXTS, "got shift-concat; expected the update strategy slot or pointer-shift"),
        ("slot", (28, 30, 32), "growth staggered: got contexts of 28, 30, 32 tokens for 3 layers; expected at"),
    ],
)
def test_what_cannot_grow_is_refused_by_name(strategy, contexts, message):
    with pytest.raises(UsageError, match=message):
        KVCache(geometry_of(32, layers=3), ar=[1, 4], strategy=strategy, allocation=Allocation(Growth(contexts)))


def test_a_growth_that_cannot_be_is_refused():
    with pytest.raises(UsageError, match="growth: got 'slow'; expected staggered or together"):
        parse_growth("slow", CONTEXTS)
    with pytest.raises(UsageError, match="growth: got one context, of 32 tokens; expected several"):
        parse_growth("staggered", [32])
    with pytest.raises(ValueError, match="contexts"):
        Growth((16, 8))
    for contexts in ((8, 16), (4, 32)):
        with pytest.raises(ValueError, match="expected contexts up to 32, all above AR-4"):
            KVCache(geometry_of(32), ar=[1, 4], allocation=Allocation(Growth(contexts)))


@pytest.mark.parametrize("growth", GROWTHS)
def test_states_do_not_grow_with_the_context(growth: GrowthName) -> None:
    """Also S of as many rows as the context has tokens, or more."""
    rule = DeltaRule(frozenset({0, 1}), 4, 1, 1, 128, 8)
    states = ConvolutionStates(rule.layers, rule.kernel, rule.channels)
    geometry = LayeredGeometry(4, 128, (1,), (8,), states=states, delta_rule=rule)
    encodings = [Encoding("u16", 1e-4, 32768)] * sum(each.tensors for each in geometry.groups())
    cache = KVCache(
        geometry, ar=(1, 16), strategy="slot", encodings=encodings, allocation=Allocation(Growth((32, 64, 128), growth))
    )
    assert [group.reallocations for group in cache.groups if isinstance(group, RowGroup)] == [0, 0]
    for held_tokens in range(100):
        cache.window(1, next(context for context in (32, 64, 128) if context > held_tokens))
        cache.commit(1)
    assert [group.reallocations for group in cache.groups if isinstance(group, RowGroup)] == [2, 2]
