"""The prefix store in memory."""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgekv.errors import EngineError, PrefixError, UsageError
from edgekv.kv import LayeredGeometry, RowSpec
from edgekv.prefix import (
    GroupRows,
    PrefixStore,
    RetentionPolicy,
    Snapshot,
    StoreConfig,
    StoreStats,
    TokenRangeRetentionConfig,
)
from edgekv.prefix.keys import common_tokens, token_bytes
from edgekv.prefix.retention import _read_range
from edgekv.prefix.rows import BlockGroup, split_layers
from edgekv.prefix.stats import add_since, counts
from tests.support.prefix_cases import (
    BLOCK_BYTES,
    GEOMETRY,
    STEP,
    Tokens,
    fetch,
    found,
    insert,
    rows_of,
    source,
    split,
    store_of,
)

SEQUENCE = tuple(range(9))


@pytest.mark.parametrize("length", range(10))
@pytest.mark.parametrize("partial", [True, False])
def test_every_length_around_the_edges_of_blocks_is_matched(length: int, partial: bool) -> None:
    store = store_of(8, enable_partial_reuse=partial)
    assert insert(store, SEQUENCE) == 8
    for tokens in (SEQUENCE[:length], (*SEQUENCE[:length], 99, 98, 97)):
        match = store.match(tokens)
        assert match.tokens == (min(length, 8) if partial else min(length, 8) // STEP * STEP)
        np.testing.assert_array_equal(fetch(store, match)[0], rows_of(SEQUENCE[: match.tokens]))


def test_a_block_is_found_as_soon_as_it_is_full() -> None:
    store = store_of(8)
    for length in range(1, 9):
        first = (length - 1) // STEP * STEP
        assert store.insert(SEQUENCE[:length], source(SEQUENCE[:length], first=first)) == length // STEP * STEP
    assert found(store, SEQUENCE) == 8


def test_rows_are_restored_into_memory_of_any_strides() -> None:
    store = store_of(8)
    insert(store, SEQUENCE)
    match = store.match(SEQUENCE[:7])
    arena = np.zeros((GEOMETRY.tensors, 20, GEOMETRY.head_dim), np.uint8)
    store.restore(match, GroupRows([arena[:, 3:10]]))
    np.testing.assert_array_equal(arena[:, 3:10], rows_of(SEQUENCE[:7]))
    assert not arena[:, :3].any()
    assert not arena[:, 10:].any()


def test_a_match_outlives_the_eviction_of_its_blocks() -> None:
    store = store_of(2)
    insert(store, (1, 2, 3, 4))
    match = store.match((1, 2, 3, 4))
    insert(store, (5, 6, 7, 8))
    assert found(store, (1, 2, 3, 4)) == 0
    np.testing.assert_array_equal(fetch(store, match)[0], rows_of((1, 2, 3, 4)))


def test_a_sequence_larger_than_the_memory_is_stored_as_far_as_it_fits() -> None:
    store = store_of(2)
    assert insert(store, SEQUENCE) == 4
    assert (found(store, SEQUENCE), store.stats.blocks_refused) == (4, 1)


def test_blocks_that_make_way_are_counted_and_memory_is_never_exceeded() -> None:
    store = store_of(2)
    for first in (10, 20, 30, 40):
        insert(store, (first, first + 1))
        assert store.stats.memory.bytes_held <= 2 * BLOCK_BYTES
    stats = store.stats
    assert (stats.memory.blocks, stats.memory.evictions, stats.blocks_inserted) == (2, 2, 4)
    assert (stats.disk.blocks, stats.disk.bytes_held, store.save()) == (0, 0, 0), "it has no folder"


def test_without_reuse_nothing_is_stored_or_found() -> None:
    store = store_of(8, enable_block_reuse=False)
    assert insert(store, SEQUENCE) == 0
    assert found(store, SEQUENCE) == 0
    assert store.stats.memory.blocks == 0


def test_only_equal_salts_and_adapters_share() -> None:
    store = store_of(32)
    names = [(salt, adapter) for salt in (None, "a", "b") for adapter in (None, "a", "x")]
    for name in names[::2]:
        store.insert(SEQUENCE, source(SEQUENCE, repr(name)), salt=name[0], adapter=name[1])
    for number, name in enumerate(names):
        match = store.match(SEQUENCE, *name)
        assert match.tokens == (0 if number % 2 else 8)
        np.testing.assert_array_equal(fetch(store, match)[0], rows_of(SEQUENCE[: match.tokens], repr(name)))


def test_a_public_sequence_is_found_under_any_salt() -> None:
    """Only the tokens of the public sequence: what others stored without a salt stays theirs."""
    store = store_of(32)
    public, private = SEQUENCE[:6], (*SEQUENCE[:4], 50, 51, 52, 53)
    store.insert(public, source(public))
    store.publish(public)
    store.insert(private, source(private))
    for salt, tokens, expected in [(None, SEQUENCE, 6), ("t", SEQUENCE, 6), ("t", private, 4), (None, private, 8)]:
        match = store.match(tokens, salt)
        assert match.tokens == expected
        np.testing.assert_array_equal(fetch(store, match)[0], rows_of(tokens[:expected]))
    insert(store, SEQUENCE, salt="t")
    assert found(store, SEQUENCE, "t") == 8


def test_the_lowest_priority_goes_first_and_the_min_recently_used_within_it() -> None:
    store = store_of(4)
    for token, priority in ((1, 80), (2, 10), (3, 35), (4, 35)):
        insert(store, (token, token), priority)
    found(store, (3, 3))
    left = []
    for fresh in (5, 6, 7):
        insert(store, (fresh, fresh), 90)
        left.append(sorted({int.from_bytes(block.link.tokens[:8]) for block in store._memory} & {1, 2, 3, 4}))
    assert left == [[1, 3, 4], [1, 3], [1]]


def test_uses_keep_their_order_when_the_clock_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(3)
    for token, now_ns in ((1, 9_000), (2, 500), (3, 400), (4, 300), (5, 200)):
        monkeypatch.setattr("edgekv.prefix.block.time_ns", lambda now_ns=now_ns: now_ns)
        insert(store, (token, token))
    assert [found(store, (token, token)) for token in (1, 2, 3, 4, 5)] == [0, 0, 2, 2, 2]


def test_leaves_go_before_what_they_need() -> None:
    store = store_of(3)
    policy = RetentionPolicy((TokenRangeRetentionConfig(0, 2, 0), TokenRangeRetentionConfig(2, 4, 100)))
    store.insert((1, 2, 3, 4), source((1, 2, 3, 4)), retention=policy)
    insert(store, (5, 6))
    insert(store, (7, 8))
    assert (found(store, (1, 2, 3, 4)), found(store, (5, 6)), found(store, (7, 8))) == (4, 0, 2)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0-448:100", TokenRangeRetentionConfig(0, 448, 100)),
        (" 5-:20:60000 ", TokenRangeRetentionConfig(5, None, 20, 60_000)),
    ],
)
def test_ranges_are_read_as_users_write_them(text: str, wanted: TokenRangeRetentionConfig) -> None:
    assert _read_range("--retention", text) == wanted


@pytest.mark.parametrize("field", ["max_bytes", "max_tokens", "disk_cache_size", "free_memory_fraction"])
def test_a_budget_of_nothing_is_refused_and_the_min_one_taken(field: str) -> None:
    with pytest.raises(PrefixError, match=field):
        StoreConfig(**{field: 0})
    assert StoreConfig(**{field: 1})


def test_a_priority_reverts_when_its_duration_is_over() -> None:
    now = [0]
    config = StoreConfig(tokens_per_block=STEP, max_bytes=2 * BLOCK_BYTES)
    store = PrefixStore(GEOMETRY, config, clock_ms=lambda: now[0])
    policy = RetentionPolicy((TokenRangeRetentionConfig(0, None, 90, duration_ms=10),))
    store.insert((1, 1), source((1, 1)), retention=policy)
    insert(store, (2, 2), 36)
    now[0] = 9
    insert(store, (3, 3), 36)
    assert found(store, (2, 2)) == 0
    now[0] = 10
    insert(store, (4, 4), 36)
    assert found(store, (1, 1)) == 0
    assert found(store, (3, 3)) == 2


def test_a_block_has_the_priority_of_its_first_token() -> None:
    ranges = (TokenRangeRetentionConfig(10, 61, 80, 5), TokenRangeRetentionConfig(64, None, 20))
    policy = RetentionPolicy(ranges, decode_retention_priority=7, decode_duration_ms=3)
    asked = [policy.of(first, 100) for first in (0, 10, 60, 61, 64, 99, 100, 5000)]
    said = [None if a is None else (a.priority, a.duration_ms) for a in asked]
    assert said == [None, (80, 5), (80, 5), None, (20, None), (20, None), (7, 3), (7, 3)]


def test_generated_tokens_have_a_priority_of_their_own() -> None:
    store = store_of(4)
    policy = RetentionPolicy(decode_retention_priority=1)
    store.insert((1, 2, 3, 4), source((1, 2, 3, 4)), prompt_tokens=2, retention=policy)
    insert(store, (5, 6, 7, 8), 35)
    insert(store, (9, 9))
    assert found(store, (1, 2, 3, 4)) == 2


def test_the_host_cache_is_memory_beside_the_other_limit() -> None:
    store = store_of(2, host_cache_size=4 * BLOCK_BYTES)
    for first in (1, 5, 9):
        assert insert(store, (first, 2, 3, 4)) == 4
    assert [found(store, (first, 2, 3, 4)) for first in (1, 5, 9)] == [4, 4, 4]
    assert store.stats.memory.bytes_held == 6 * BLOCK_BYTES


def test_the_end_of_a_sequence_is_found_and_makes_way_for_what_continues_it() -> None:
    store = store_of(8)
    assert store.insert((1, 2, 3), source((1, 2, 3)), ended=True) == 3
    assert (found(store, (1, 2, 3, 4)), store.stats.memory.blocks) == (3, 2)
    assert insert(store, (1, 2, 3, 4)) == 4
    assert (found(store, (1, 2, 3, 4)), store.stats.memory.blocks) == (4, 2)
    assert store.insert((1, 2, 3), source((1, 2, 3)), ended=True) == 3  # known already
    assert store.stats.memory.blocks == 2
    assert store_of(8, enable_partial_reuse=False).insert((1, 2, 3), source((1, 2, 3)), ended=True) == 2


def test_statistics_tell_hits_from_partial_hits_and_misses() -> None:
    store = store_of(8)
    insert(store, SEQUENCE)
    for tokens in (SEQUENCE[:4], SEQUENCE[:3], (77,), SEQUENCE):
        found(store, tokens)
    stats = store.stats
    assert (stats.hits, stats.partial_hits, stats.misses) == (3, 1, 1)
    assert (stats.tokens_asked, stats.tokens_saved) == (17, 15)
    assert (stats.memory.blocks, stats.memory.bytes_held) == (4, 4 * BLOCK_BYTES)


def test_what_was_counted_since_a_copy_adds_up() -> None:
    store, total = store_of(8), StoreStats()
    insert(store, SEQUENCE)
    found(store, SEQUENCE)
    before = store.stats
    found(store, SEQUENCE)
    for _ in range(2):
        add_since(total, store.counters, counts(before))
    moved = store.counters.memory.bytes_out - before.memory.bytes_out
    assert (total.hits, total.blocks_inserted, total.memory.bytes_in) == (2, 0, 0)
    assert total.memory.bytes_out == 2 * moved > 0 and before.hits == 1


# ---------------------------------------------------------------------- layers with an attention window

TWO_WINDOWS = LayeredGeometry(4, 16, (1,), (2,), (16, 4))
ALL_TENSORS = RowSpec(layers=4, kv_heads=1, head_dim=2, window=16)


def limited_store(blocks: int) -> PrefixStore:
    """Full attention in layers 0 and 2, a window of 4 tokens in layers 1 and 3; memory for as many blocks of each."""
    size = STEP * ALL_TENSORS.tensors * ALL_TENSORS.row_bytes
    return PrefixStore(TWO_WINDOWS, StoreConfig(tokens_per_block=STEP, max_bytes=blocks * size))


def test_layers_share_blocks_by_window_and_heads() -> None:
    groups = split_layers(LayeredGeometry(4, 64, (2, 2, 1, 2), (8,), (64, 8)))
    assert [(g.window, g.geometry.kv_heads, g.geometry.numbers) for g in groups] == [
        (None, 2, (0,)),
        (None, 1, (2,)),
        (8, 2, (1, 3)),
    ]
    assert [g.window for g in split_layers(RowSpec(2, 2, 8, 64))] == [None]


@given(st.integers(1, 40), st.integers(0, 60))
def test_a_token_attends_to_itself_and_to_as_many_before_it_as_its_window_has(window: int, tokens: int) -> None:
    geometry = RowSpec(layers=1, kv_heads=1, head_dim=2, window=64)
    assert tokens - BlockGroup(geometry, window).first_needed(tokens) == min(tokens, window - 1)
    assert BlockGroup(geometry, None).first_needed(tokens) == 0


def test_large_blocks_begin_at_a_page_and_small_ones_take_no_more_than_their_rows() -> None:
    group = BlockGroup(RowSpec(layers=16, kv_heads=8, head_dim=64, window=64), None)
    large, small = (group.empty(tokens, np.dtype(np.int16)) for tokens in (32, 1))
    assert large.shape == (256, 32, 64) and large.ctypes.data % mmap.PAGESIZE == 0
    assert small.shape == (256, 1, 64) and small.base is None


def test_a_limited_window_needs_its_last_tokens_alone() -> None:
    store = limited_store(4)  # six blocks of full attention and two of the windows
    tokens = tuple(range(12))
    full, limited = split(store, rows_of(tokens, geometry=ALL_TENSORS))
    assert store.insert(tokens, GroupRows([full, limited])) == 12
    found_full, found_limited = fetch(store, store.match(tokens))
    np.testing.assert_array_equal(found_full, full)
    np.testing.assert_array_equal(found_limited[:, 9:], limited[:, 9:])
    assert not found_limited[:, :9].any()
    assert store.match(tokens[:6]).tokens == 0


def test_a_source_without_the_first_rows_of_a_window_stores_what_it_has() -> None:
    """Layers with a window drop rows that the others still have."""
    store = limited_store(16)
    tokens = tuple(range(12))
    full, limited = split(store, rows_of(tokens, geometry=ALL_TENSORS))
    assert store.insert(tokens, GroupRows([full, limited[:, 8:]], [0, 8])) == 12
    assert [store.match(tokens[:n]).tokens for n in (12, 11, 10, 9, 8)] == [12, 11, 0, 0, 0]
    restored = [np.zeros_like(full), np.zeros_like(limited[:, 8:])]
    store.restore(store.match(tokens), GroupRows(restored, [0, 8]))
    assert np.array_equal(restored[0], full) and np.array_equal(restored[1][:, 1:], limited[:, 9:])


# ---------------------------------------------------------------------- states

STATES = {"recurrent": np.arange(6, dtype=np.int16).reshape(2, 3), "conv": np.ones((1, 4), np.uint8)}


def states_store(blocks: int = 32, **changes: object) -> PrefixStore:
    config = StoreConfig(tokens_per_block=4, max_bytes=blocks * 2 * BLOCK_BYTES, **changes)  # type: ignore[arg-type]
    return PrefixStore(GEOMETRY, config, fingerprint="hybrid", snapshots=True)


def keep_states(store: PrefixStore, tokens: Tokens, at: int) -> int:
    arrays = {name: each + each.dtype.type(at) for name, each in STATES.items()}
    return store.insert(tokens, source(tokens), ended=True, snapshot=Snapshot(at, arrays))


def test_a_match_ends_where_rows_and_a_snapshot_are() -> None:
    store = states_store()
    for at in (4, 6, 11):
        assert keep_states(store, (*SEQUENCE, 9, 10, 11), at) == 12
    lengths = {}
    for length in range(13):
        match = store.match((*SEQUENCE, 9, 10, 11)[:length])
        lengths[length] = match.tokens
        if match.states is not None:
            assert match.states.link.end == match.tokens
            for name, array in match.states.arrays.items():
                np.testing.assert_array_equal(array, STATES[name] + STATES[name].dtype.type(match.tokens))
        np.testing.assert_array_equal(fetch(store, match)[0], rows_of((*SEQUENCE, 9, 10, 11)[: match.tokens]))
    assert lengths == {n: max(at for at in (0, 4, 6, 11) if at <= n) for n in range(13)}
    assert store.match((*SEQUENCE[:5], 77, 77)).tokens == 4


def test_a_snapshot_inside_a_block_outlives_what_continues_the_block() -> None:
    """The end of a turn, from which the next turn goes on in several ways."""
    store = states_store()
    assert keep_states(store, SEQUENCE[:6], 6) == 6
    assert store.insert(SEQUENCE[:8], source(SEQUENCE[:8])) == 8
    match = store.match((*SEQUENCE[:6], 50, 51))
    assert (match.tokens, match.states is not None) == (6, True)
    np.testing.assert_array_equal(fetch(store, match)[0], rows_of(SEQUENCE[:6]))


def test_a_snapshot_that_the_model_refuses_is_not_found_again() -> None:
    store = states_store()
    for at in (4, 8):
        keep_states(store, SEQUENCE[:8], at)
    match = store.match(SEQUENCE)
    store.reject_snapshot(match)
    assert (match.tokens, store.match(SEQUENCE).tokens, store.stats.rejected_files) == (8, 4, 1)


def test_a_snapshot_goes_before_the_rows_that_lead_to_it() -> None:
    store = states_store(blocks=3)  # each block of rows, and each snapshot, is a third of the memory
    tokens = SEQUENCE[:4]
    assert keep_states(store, tokens, 4) == 4
    for first in (50, 60):
        insert(store, (first, 1, 1, 1))
    assert (store.match(tokens).tokens, store.stats.memory.blocks) == (0, 3)
    inserted = store.stats.blocks_inserted
    keep_states(store, tokens, 4)
    assert (store.match(tokens).tokens, store.stats.blocks_inserted - inserted) == (4, 1)


def test_a_snapshot_larger_than_the_memory_is_refused_and_nothing_makes_way_for_it() -> None:
    store, tokens = states_store(blocks=2), SEQUENCE[:4]
    large = Snapshot(4, {"state": np.zeros(5 * BLOCK_BYTES, np.uint8)})
    store.insert(tokens, source(tokens), snapshot=large)
    stats = store.stats
    assert (stats.memory.bytes_held, stats.memory.evictions, stats.blocks_refused) == (2 * BLOCK_BYTES, 0, 1)


def test_snapshots_and_stores_without_are_kept_apart() -> None:
    with pytest.raises(
        ValueError, match="snapshot: got one after 2 of 2 tokens; expected one within them, and a store"
    ):
        store_of(8).insert((1, 2), source((1, 2)), snapshot=Snapshot(2, STATES))
    with pytest.raises(ValueError, match="snapshot: got one after 3 of 2 tokens"):
        states_store().insert((1, 2), source((1, 2)), snapshot=Snapshot(3, STATES))


# ---------------------------------------------------------------------- laws

SHORT = st.lists(st.integers(0, 2), max_size=5).map(tuple)


@given(SHORT, SHORT)
def test_bytes_of_tokens_sort_and_share_as_the_tokens_do(one: Tokens, other: Tokens) -> None:
    assert (token_bytes(one) < token_bytes(other)) == (one < other)
    shared = next((i for i in range(min(len(one), len(other))) if one[i] != other[i]), min(len(one), len(other)))
    assert common_tokens(token_bytes(one), token_bytes(other)) == shared


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4).map(tuple), unique=True, max_size=12), st.data())
def test_the_child_with_the_longest_common_beginning_is_found(children: list[Tokens], data: st.DataObject) -> None:
    store = store_of_four()
    for tokens in children:
        insert(store, tokens)
    query = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple))
    shared = [next((i for i in range(len(query)) if t[i] != query[i]), len(query)) for t in children]
    assert found(store, query) == max(shared, default=0)


def store_of_four() -> PrefixStore:
    return PrefixStore(GEOMETRY, StoreConfig(tokens_per_block=4, max_bytes=64 * BLOCK_BYTES))


# ---------------------------------------------------------------------- budgets


def test_the_min_of_the_limits_is_the_budget() -> None:
    def budget(**changes: object) -> int:
        config = StoreConfig(**{"tokens_per_block": STEP, **changes})  # type: ignore[arg-type]
        return config.memory_bytes(split_layers(GEOMETRY), GEOMETRY.context, free_bytes=1000)

    assert budget() == 900
    assert budget(free_memory_fraction=0.5) == 500
    assert budget(max_tokens=41) == 41 * BLOCK_BYTES // STEP
    assert budget(max_tokens=41, max_bytes=56) == 56
    assert budget(max_tokens=41, max_bytes=56, host_cache_size=10) == 66
    assert budget(max_tokens=5000) == 900
    assert StoreConfig().memory_bytes(split_layers(GEOMETRY), 64, free_bytes=1 << 34) == 256 << 20


def test_tokens_of_a_budget_count_no_more_than_the_window_of_a_layer() -> None:
    config = StoreConfig(tokens_per_block=STEP, max_tokens=16)
    assert config.memory_bytes(split_layers(TWO_WINDOWS), 16, 1 << 20) == 8 * 16 + 8 * 4


def test_a_system_that_does_not_report_free_memory_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise EngineError("free memory", got="nothing", expected="a size", fix="Give the size in bytes.")

    monkeypatch.setattr("edgekv.prefix.config.free_memory_bytes", refuse)
    assert insert(PrefixStore(GEOMETRY), tuple(range(32))) == 32
    with pytest.raises(EngineError):
        PrefixStore(GEOMETRY, StoreConfig(free_memory_fraction=0.5))


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "a block size of 1": (lambda: StoreConfig(tokens_per_block=1), "tokens_per_block: got 1; expected a power of two"),
    "a block size of 48": (lambda: StoreConfig(tokens_per_block=48), "tokens_per_block: got 48; expected a power of"),
    "a block size of 0": (lambda: StoreConfig(tokens_per_block=0), "tokens_per_block: got 0"),
    "a budget below a block": (lambda: store_of(0, max_bytes=7), "max_bytes: got 7 bytes; expected at least 8 bytes"),
    "tokens below a block": (lambda: store_of(9, max_tokens=1), "max_tokens: got 4 bytes; expected at least 8 bytes"),
    "too little free memory": (
        lambda: StoreConfig().memory_bytes(split_layers(GEOMETRY), 64, free_bytes=10),
        "free_memory_fraction: got 9 bytes; expected at least 128 bytes",
    ),
    "a negative host memory": (lambda: StoreConfig(host_cache_size=-1), "host_cache_size: got -1"),
    "a fraction of 0": (lambda: StoreConfig(free_memory_fraction=0), "free_memory_fraction: got 0; expected above 0"),
    "a fraction above 1": (lambda: StoreConfig(free_memory_fraction=1.5), "free_memory_fraction: got 1.5"),
    "an offload priority of 101": (
        lambda: StoreConfig(secondary_offload_min_priority=101),
        "secondary_offload_min_priority: got 101; expected 0 to 100",
    ),
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
    "an empty salt": (lambda: store_of(9).match((1,), salt=""), "cache_salt: got an empty text"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused_by_field(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(PrefixError, match=re.escape(message)) as caught:
        call()
    assert isinstance(caught.value, UsageError)
    assert isinstance(caught.value, ValueError)


MISUSED: dict[str, tuple[Callable[[PrefixStore], object], str]] = {
    "a prompt behind the end": (lambda s: s.insert((1,), source((1,)), prompt_tokens=2), "prompt_tokens: got 2"),
    "a negative token": (lambda s: s.match((-1,)), "tokens: got one out of range; expected 0 to 18446744073709551615"),
    "a token beyond 64 bits": (lambda s: s.match((1 << 64,)), "tokens: got one out of range"),
}


@pytest.mark.parametrize("name", MISUSED)
def test_misuse_is_refused(name: str) -> None:
    call, message = MISUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call(store_of(8))
