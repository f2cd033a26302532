from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv.errors import EngineError, UsageError
from edgekv.kv import Geometry, LayeredGeometry
from edgekv.prefix import (
    BlockAllocator,
    Match,
    PrefixError,
    PrefixStore,
    RetentionPolicy,
    StoreConfig,
    TokenRangeRetentionConfig,
    split_layers,
)
from edgekv.prefix.block import Block, Node
from edgekv.prefix.heap import BlockHeap
from edgekv.prefix.index import longest_usable
from edgekv.prefix.tree import Tree
from tests.test_prefix_model import BLOCK_BYTES, GEOMETRY, STEP, Tokens, audit, rows_of

SEQUENCE = tuple(range(9))


def store_of(blocks: int, **changes: object) -> PrefixStore:
    """A store of so many blocks, each of two tokens."""
    config = StoreConfig(**{"tokens_per_block": STEP, "max_bytes": blocks * BLOCK_BYTES, **changes})  # type: ignore[arg-type]
    return PrefixStore(GEOMETRY, config)


def insert(store: PrefixStore, tokens: Tokens, priority: int | None = None, salt: str | None = None) -> int:
    policy = None if priority is None else RetentionPolicy((TokenRangeRetentionConfig(0, None, priority),))
    return store.insert(tokens, rows_of(tokens, salt), retention=policy, salt=salt)


def found(store: PrefixStore, tokens: Tokens, salt: str | None = None) -> int:
    match = store.match(tokens, salt)
    store.release(match)
    return match.tokens


@pytest.mark.parametrize("length", range(10))
@pytest.mark.parametrize("partial", [True, False])
def test_every_length_around_the_edges_of_blocks_is_matched(length: int, partial: bool) -> None:
    store = store_of(8, enable_partial_reuse=partial)
    assert insert(store, SEQUENCE) == 8
    for tokens in (SEQUENCE[:length], (*SEQUENCE[:length], 99, 98, 97)):
        match = store.match(tokens)
        assert match.tokens == (min(length, 8) if partial else min(length, 8) // STEP * STEP)
        np.testing.assert_array_equal(store.fetch(match), rows_of(SEQUENCE[: match.tokens]))


def test_a_block_is_found_as_soon_as_it_is_full() -> None:
    store = store_of(8)
    rows = rows_of(SEQUENCE)
    for length in range(1, 9):
        first = (length - 1) // STEP * STEP
        assert store.insert(SEQUENCE[:length], rows[:, first:length], first=first) == length // STEP * STEP
    assert found(store, SEQUENCE) == 8


def test_rows_are_fetched_into_memory_of_any_strides() -> None:
    store = store_of(8)
    insert(store, SEQUENCE)
    match = store.match(SEQUENCE[:7])
    arena = np.zeros((GEOMETRY.tensors, 20, GEOMETRY.head_dim), np.uint8)
    store.fetch(match, arena[:, 3:10])
    np.testing.assert_array_equal(arena[:, 3:10], rows_of(SEQUENCE[:7]))
    assert not arena[:, :3].any()
    assert not arena[:, 10:].any()


def test_requests_share_blocks_which_stay_while_one_of_them_holds_them() -> None:
    store = store_of(2)
    insert(store, (1, 2, 3, 4))
    first, second = store.match((1, 2, 3, 4)), store.match((1, 2, 9))
    assert store.stats.primary.blocks == 2
    store.release(first)
    assert insert(store, (5, 6, 7, 8)) == 2
    assert insert(store, (5, 6, 7, 8)) == 2
    np.testing.assert_array_equal(store.fetch(second), rows_of((1, 2)))
    assert store.stats.blocks_refused == 2
    store.release(second)
    assert insert(store, (5, 6, 7, 8)) == 4
    audit(store, [])


def test_what_a_running_request_has_stored_stays_until_it_is_released() -> None:
    store = store_of(2)
    running = store.match((1,))
    store.insert((1, 2, 3, 4), rows_of((1, 2, 3, 4)), match=running)
    assert running.tokens == 4
    assert insert(store, (5, 6)) == 0
    store.release(running)
    assert insert(store, (5, 6)) == 2


def test_without_reuse_nothing_is_stored_or_found() -> None:
    store = store_of(8, enable_block_reuse=False)
    assert insert(store, SEQUENCE) == 0
    assert found(store, SEQUENCE) == 0
    assert store.stats.primary.blocks == 0


def test_partial_reuse_without_a_copy_takes_a_free_leaf_out_of_the_store() -> None:
    store = store_of(8, copy_on_partial_reuse=False)
    insert(store, (1, 2, 3, 4))
    assert found(store, (1, 9)) == 0  # a block follows
    holder = store.match((1, 2, 3, 4))
    assert found(store, (1, 2, 3, 9)) == 2  # somebody holds it
    store.release(holder)
    taken = store.match((1, 2, 3, 9))
    assert (taken.tokens, found(store, (1, 2, 3, 4))) == (3, 2)
    np.testing.assert_array_equal(store.fetch(taken), rows_of((1, 2, 3)))
    store.release(taken)
    assert store.stats.primary.blocks == 1


def test_only_equal_salts_share() -> None:
    store = store_of(16)
    insert(store, SEQUENCE, salt="a")
    assert [found(store, SEQUENCE, salt) for salt in ("a", "b", None)] == [8, 0, 0]


def test_the_lowest_priority_goes_first_and_the_least_recently_used_within_it() -> None:
    store = store_of(4)
    for token, priority in ((1, 80), (2, 10), (3, 35), (4, 35)):
        insert(store, (token, token), priority)
    found(store, (3, 3))
    gone = []
    for fresh in (5, 6, 7):
        insert(store, (fresh, fresh), 90)
        gone.append([token for token in (1, 2, 3, 4) if found_quietly(store, token) == 0])
    assert gone == [[2], [2, 4], [2, 3, 4]]


def found_quietly(store: PrefixStore, token: int) -> int:
    """Whether a block is there, without using it."""
    return sum((token, token) in root.children for root in store._tree.roots.values())


def test_leaves_go_before_what_they_need() -> None:
    store = store_of(3)
    policy = RetentionPolicy((TokenRangeRetentionConfig(0, 2, 0), TokenRangeRetentionConfig(2, 4, 100)))
    store.insert((1, 2, 3, 4), rows_of((1, 2, 3, 4)), retention=policy)
    insert(store, (5, 6))
    insert(store, (7, 8))
    assert (found(store, (1, 2, 3, 4)), found(store, (5, 6)), found(store, (7, 8))) == (4, 0, 2)


def test_a_priority_reverts_when_its_duration_is_over() -> None:
    now = [0]
    config = StoreConfig(tokens_per_block=STEP, max_bytes=2 * BLOCK_BYTES)
    store = PrefixStore(GEOMETRY, config, clock_ms=lambda: now[0])
    policy = RetentionPolicy((TokenRangeRetentionConfig(0, None, 90, duration_ms=10),))
    store.insert((1, 1), rows_of((1, 1)), retention=policy)
    insert(store, (2, 2), 36)
    now[0] = 9
    insert(store, (3, 3), 36)
    assert found_quietly(store, 1)
    now[0] = 10
    insert(store, (4, 4), 36)
    assert not found_quietly(store, 1)


def test_a_block_has_the_priority_of_its_first_token() -> None:
    ranges = (TokenRangeRetentionConfig(10, 61, 80, 5), TokenRangeRetentionConfig(64, None, 20))
    policy = RetentionPolicy(ranges, decode_retention_priority=7, decode_duration_ms=3)
    asked = [policy.of(first, 100) for first in (0, 10, 60, 61, 64, 99, 100, 5000)]
    said = [None if a is None else (a.priority, a.duration_ms) for a in asked]
    assert said == [None, (80, 5), (80, 5), None, (20, None), (20, None), (7, 3), (7, 3)]


def test_generated_tokens_have_a_priority_of_their_own() -> None:
    store = store_of(4)
    policy = RetentionPolicy(decode_retention_priority=1)
    store.insert((1, 2, 3, 4), rows_of((1, 2, 3, 4)), prompt_tokens=2, retention=policy)
    insert(store, (5, 6, 7, 8), 35)
    insert(store, (9, 9))
    assert found(store, (1, 2, 3, 4)) == 2


def test_evicted_blocks_come_back_from_host_memory() -> None:
    store = store_of(2, host_cache_size=4 * BLOCK_BYTES)
    insert(store, (1, 2, 3, 4))
    insert(store, (5, 6, 7, 8))
    assert store.stats.host.blocks == 2
    match = store.match((1, 2, 3, 4))
    np.testing.assert_array_equal(store.fetch(match), rows_of((1, 2, 3, 4)))
    stats = store.stats
    assert (stats.primary.evictions, stats.host.bytes_in, stats.host.bytes_out) == (4, 4 * BLOCK_BYTES, 2 * BLOCK_BYTES)


def test_a_block_that_comes_back_from_a_full_host_memory_changes_places() -> None:
    store = store_of(1, host_cache_size=BLOCK_BYTES)
    insert(store, (1, 1))
    insert(store, (2, 2))
    for tokens in ((1, 1), (2, 2), (1, 1)):
        match = store.match(tokens)
        np.testing.assert_array_equal(store.fetch(match), rows_of(tokens))
        store.release(match)
    assert store.stats.host.evictions == 0
    audit(store, [])


def test_the_end_of_a_sequence_is_found_and_makes_way_for_what_continues_it() -> None:
    store = store_of(8)
    assert store.insert((1, 2, 3), rows_of((1, 2, 3)), ended=True) == 3
    assert (found(store, (1, 2, 3, 4)), store.stats.primary.blocks) == (3, 2)
    assert insert(store, (1, 2, 3, 4)) == 4
    assert (found(store, (1, 2, 3, 4)), store.stats.primary.blocks) == (4, 2)
    assert store_of(8, enable_partial_reuse=False).insert((1, 2, 3), rows_of((1, 2, 3)), ended=True) == 2


def test_heads_of_different_widths_have_no_common_array() -> None:
    store = PrefixStore(LayeredGeometry(2, 16, (1,), (2, 4)), StoreConfig(tokens_per_block=STEP, max_bytes=1 << 12))
    with pytest.raises(ValueError, match=r"rows: got heads of widths \[2, 4\]"):
        store.insert((1, 2), rows_of((1, 2)))


def test_statistics_tell_hits_from_partial_hits_and_misses() -> None:
    store = store_of(8)
    insert(store, SEQUENCE)
    for tokens in (SEQUENCE[:4], SEQUENCE[:3], (77,), SEQUENCE):
        found(store, tokens)
    stats = store.stats
    assert (stats.hits, stats.partial_hits, stats.misses) == (3, 1, 1)
    assert (stats.tokens_asked, stats.tokens_saved) == (17, 15)


TWO_WINDOWS = Geometry(layers=4, kv_heads=1, head_dim=2, context=16)


def limited_store(blocks: int) -> PrefixStore:
    """Full attention in layers 0 and 2, a window of 4 tokens in layers 1 and 3; as many full sequences fit."""
    size = STEP * TWO_WINDOWS.tensors * TWO_WINDOWS.row_bytes
    config = StoreConfig(tokens_per_block=STEP, max_bytes=blocks * size, max_attention_window=(16, 4))
    return PrefixStore(TWO_WINDOWS, config)


def test_layers_share_a_pool_by_window_and_heads() -> None:
    groups = split_layers(LayeredGeometry(4, 64, (2, 2, 1, 2), (8,), (64, 8)))
    assert [(g.window, g.kv_heads, g.layers, g.ranges) for g in groups] == [
        (None, 2, (0,), ((0, 4),)),
        (None, 1, (2,), ((8, 10),)),
        (8, 2, (1, 3), ((4, 8), (10, 14))),
    ]
    assert split_layers(Geometry(2, 2, 8, 64))[0].ranges == ((0, 8),)


def test_memory_is_divided_so_that_each_pool_holds_as_many_sequences() -> None:
    assert limited_store(10).limits.primary == (16, 4)


def test_a_limited_window_needs_its_last_tokens_alone() -> None:
    store = limited_store(5)
    tokens = tuple(range(12))
    rows = rows_of(tokens, geometry=TWO_WINDOWS)
    assert store.limits.primary == (8, 2)
    assert store.insert(tokens, rows) == 12
    match = store.match(tokens)
    fetched = store.fetch(match)
    for first, stop in store.groups[0].ranges:
        np.testing.assert_array_equal(fetched[first:stop], rows[first:stop])
    for first, stop in store.groups[1].ranges:
        np.testing.assert_array_equal(fetched[first:stop, 9:], rows[first:stop, 9:])
        assert (fetched[first:stop, :8] == TWO_WINDOWS.zero_point).all()
    assert found(store, tokens[:6]) == 0
    store.release(match)
    audit(store, [])


def test_blocks_that_left_the_window_of_a_running_request_are_free_at_once() -> None:
    store = limited_store(10)
    tokens = tuple(range(12))
    running = store.match(tokens)
    store.insert(tokens, rows_of(tokens, geometry=TWO_WINDOWS), match=running)
    full, limited = running._lease.spans
    assert (len(full.blocks), len(limited.blocks)) == (6, 2)
    other = tuple(range(50, 54))
    assert store.insert(other, rows_of(other, geometry=TWO_WINDOWS)) == 4
    audit(store, [running])
    store.release(running)


@given(st.data())
def test_the_longest_usable_length_is_that_of_a_naive_search(data: st.DataObject) -> None:
    blocks = data.draw(st.integers(0, 6))
    groups = data.draw(st.integers(1, 2))
    presence = [data.draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks)) for _ in range(groups)]
    windows = [data.draw(st.integers(2, 9)) for _ in range(groups)]
    upper = blocks * STEP - data.draw(st.integers(0, 1 if blocks else 0))

    def serves(end: int) -> bool:
        return all(
            present[token // STEP]
            for present, window in zip(presence, windows, strict=True)
            for token in range(max(0, end - window + 1), end)
        )

    ends = [upper, *range(0, upper, STEP)]
    assert longest_usable(presence, windows, STEP, upper) == max(end for end in ends if serves(end))


@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3).map(tuple), unique=True), st.data())
def test_the_nearest_children_come_first(children: list[Tokens], data: st.DataObject) -> None:
    tree = Tree(3, 1)
    root: Node = tree.root(b"")
    for tokens in children:
        node = tree.child(root, tokens)
        node.blocks[0] = Block(node, 0)
        tree.attach(node)
    query = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple))
    shared = {t: next((i for i in range(len(query)) if t[i] != query[i]), len(query)) for t in children}
    nearest = [(node.tokens, count) for node, count in tree.nearest(root, query)]
    assert dict(nearest) == {t: count for t, count in shared.items() if count}
    assert [count for _, count in nearest] == sorted((count for _, count in nearest), reverse=True)


def test_a_heap_forgets_what_is_no_longer_true() -> None:
    root = Node(None, (), 1)
    blocks = [Block(root, 0, stamp=i) for i in range(3)]
    heap = BlockHeap(lambda block: (block.priority, block.stamp))
    for turn in range(1000):
        block = blocks[turn % 3]
        block.stamp += 3
        heap.push(block)
    assert len(heap._entries) <= 65
    assert [heap.pop(), heap.pop(), heap.pop(), heap.pop()] == [blocks[1], blocks[2], blocks[0], None]


def test_an_allocator_gives_each_id_once() -> None:
    allocator = BlockAllocator(2)
    assert [allocator.allocate() for _ in range(3)] == [0, 1, None]
    allocator.retain(0)
    assert (allocator.release(0), allocator.references(0), allocator.release(0)) == (False, 1, True)
    assert (allocator.used, allocator.allocate()) == (1, 0)


@pytest.mark.parametrize("block", [-1, 2])
def test_ids_out_of_range_are_refused(block: int) -> None:
    allocator = BlockAllocator(2)
    for call in (allocator.retain, allocator.release, allocator.references):
        with pytest.raises(ValueError, match=rf"block: got {block}; expected 0 to 1"):
            call(block)


def test_a_free_id_is_not_released_again() -> None:
    with pytest.raises(ValueError, match="block: got 1, which is free"):
        BlockAllocator(2).release(1)


def test_the_default_budget_is_256_mib() -> None:
    def primary_bytes(**changes: float) -> int:
        store = PrefixStore(GEOMETRY, StoreConfig(**changes), free_bytes=1 << 34)  # type: ignore[arg-type]
        return store.limits.primary[0] * 32 * GEOMETRY.tensors * GEOMETRY.row_bytes

    assert primary_bytes() == 256 << 20
    assert primary_bytes(free_memory_fraction=0.5) == 1 << 33


def test_a_system_that_does_not_report_free_memory_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise EngineError("free memory", got="nothing", expected="a size", fix="Give the size in bytes.")

    monkeypatch.setattr("edgekv.prefix.budget.free_memory_bytes", refuse)
    assert PrefixStore(GEOMETRY).limits.primary[0] > 0
    with pytest.raises(EngineError):
        PrefixStore(GEOMETRY, StoreConfig(free_memory_fraction=0.5))


def test_the_least_of_the_limits_is_the_budget() -> None:
    def blocks(**changes: object) -> int:
        config = StoreConfig(**{"tokens_per_block": STEP, **changes})  # type: ignore[arg-type]
        return PrefixStore(GEOMETRY, config, free_bytes=100 * BLOCK_BYTES).limits.primary[0]

    assert blocks() == 90
    assert blocks(tokens_per_block=32) == 90 * STEP // 32
    assert blocks(free_memory_fraction=0.5) == 50
    assert blocks(max_tokens=41) == 20
    assert blocks(max_tokens=41, max_bytes=7 * BLOCK_BYTES) == 7
    assert blocks(max_tokens=5000) == 90


def test_memory_is_taken_as_it_is_used() -> None:
    store = PrefixStore(GEOMETRY, StoreConfig(), free_bytes=1 << 50)
    insert(store, tuple(range(32)))
    assert store.stats.primary.blocks == 1


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "a block size of 1": (lambda: StoreConfig(tokens_per_block=1), "tokens_per_block: got 1; expected a power of two"),
    "a block size of 48": (lambda: StoreConfig(tokens_per_block=48), "tokens_per_block: got 48; expected a power of"),
    "a block size of 0": (lambda: StoreConfig(tokens_per_block=0), "tokens_per_block: got 0"),
    "a budget below a block": (
        lambda: store_of(0, max_bytes=7),
        "max_bytes: got 7 bytes; expected at least 8 bytes",
    ),
    "tokens below a block": (lambda: store_of(9, max_tokens=1), "max_tokens: got 4 bytes; expected at least 8 bytes"),
    "too little free memory": (
        lambda: PrefixStore(GEOMETRY, StoreConfig(), free_bytes=10),
        "free_memory_fraction: got 9 bytes; expected at least 128 bytes",
    ),
    "a host memory below a block": (lambda: store_of(1, host_cache_size=3), "host_cache_size: got 3 bytes"),
    "a negative host memory": (lambda: StoreConfig(host_cache_size=-1), "host_cache_size: got -1"),
    "a fraction of 0": (lambda: StoreConfig(free_memory_fraction=0), "free_memory_fraction: got 0; expected above 0"),
    "a fraction above 1": (lambda: StoreConfig(free_memory_fraction=1.5), "free_memory_fraction: got 1.5"),
    "an offload priority of 101": (
        lambda: StoreConfig(secondary_offload_min_priority=101),
        "secondary_offload_min_priority: got 101; expected 0 to 100",
    ),
    "a window of 1": (lambda: store_of(9, max_attention_window=(1,)), "max_attention_window: got [1]"),
    "windows for no layer": (lambda: store_of(9, max_attention_window=(8, 8)), "max_attention_window: got [8, 8]"),
    "a priority of 101": (lambda: TokenRangeRetentionConfig(0, 1, 101), "priority: got 101; expected 0 to 100"),
    "a priority of -1": (lambda: TokenRangeRetentionConfig(0, 1, -1), "priority: got -1; expected 0 to 100"),
    "a decode priority of 101": (
        lambda: RetentionPolicy(decode_retention_priority=101),
        "decode_retention_priority: got 101",
    ),
    "a duration of 0": (lambda: TokenRangeRetentionConfig(0, 1, 5, 0), "duration_ms: got 0; expected at least 1 ms"),
    "an empty range": (lambda: TokenRangeRetentionConfig(3, 3, 5), "token_end: got 3; expected None or above"),
    "a range before the beginning": (lambda: TokenRangeRetentionConfig(-1, 3, 5), "token_start: got -1"),
    "ranges that overlap": (
        lambda: RetentionPolicy((TokenRangeRetentionConfig(60, 128, 1), TokenRangeRetentionConfig(0, 64, 1))),
        "ranges: got [0, 64) and [60, 128); expected ranges that do not overlap",
    ),
    "a range behind an open one": (
        lambda: RetentionPolicy((TokenRangeRetentionConfig(0, None, 1), TokenRangeRetentionConfig(70, 80, 1))),
        "ranges: got [0, end) and [70, 80)",
    ),
    "a disk without a fingerprint": (
        lambda: PrefixStore(GEOMETRY, StoreConfig(disk_folder=Path("x"), max_bytes=64, tokens_per_block=2)),
        "fingerprint: got ''",
    ),
    "windows beside the model's own": (
        lambda: split_layers(LayeredGeometry(1, 16, (1,), (2,), (8,)), (8,)),
        "max_attention_window: got [8]; expected none",
    ),
    "an empty salt": (lambda: store_of(9).match((1,), salt=""), "cache_salt: got an empty text"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused_by_field(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(PrefixError, match=re.escape(message)) as caught:
        call()
    assert isinstance(caught.value, UsageError)
    assert isinstance(caught.value, ValueError)


def _released(store: PrefixStore) -> Match:
    match = store.match(SEQUENCE)
    store.release(match)
    return match


MISUSED: dict[str, tuple[Callable[[PrefixStore], object], str]] = {
    "rows too few": (lambda s: s.insert(SEQUENCE, rows_of(SEQUENCE[1:])), "rows: got uint8 [2, 8, 2]; expected uint8"),
    "rows of another type": (lambda s: s.insert((1,), rows_of((1,)).astype(np.int16)), "rows: got int16 [2, 1, 2]"),
    "first behind the end": (lambda s: s.insert((1,), rows_of(()), first=2), "first: got 2; expected 0 to 1"),
    "a prompt behind the end": (lambda s: s.insert((1,), rows_of((1,)), prompt_tokens=2), "prompt_tokens: got 2"),
    "a released match is fetched": (lambda s: s.fetch(_released(s)), "match: got one that was released"),
    "a match is released twice": (lambda s: s.release(_released(s)), "match: got one that was released"),
    "a match of another salt": (
        lambda s: s.insert((1,), rows_of((1,)), salt="a", match=s.match((1,))),
        "match: got one of another salt",
    ),
    "an output of another shape": (
        lambda s: s.fetch(s.match(SEQUENCE), np.empty((2, 3, 2), np.uint8)),
        "out: got uint8 [2, 3, 2]; expected uint8 [2, 0, 2]",
    ),
}


@pytest.mark.parametrize("name", MISUSED)
def test_misuse_is_refused(name: str) -> None:
    call, message = MISUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call(store_of(8))
