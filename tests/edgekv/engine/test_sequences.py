from __future__ import annotations

import weakref
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from edgekv.engine import (
    CacheMode,
    Request,
    Sequence,
    Session,
    SessionPool,
    Setup,
    parse_budget,
)
from edgekv.engine.session import common_tokens
from edgekv.errors import MemoryBudgetError, UsageError
from edgekv.kv import KVCache, RowSpec
from edgekv.machine.system import free_memory_bytes
from tests.support.thorough import at_most

GEOMETRY = RowSpec(layers=1, kv_heads=1, head_dim=4, window=16)


def _cache(policy: str = "fail") -> KVCache:
    return KVCache(GEOMETRY, ar=(1, 4), strategy="slot", policy=policy)


BYTES = _cache().stats.bytes_held


class NoGraphs:
    """In place of a bundle's graphs: nothing runs here."""

    cache = None

    def position_offsets(self) -> None:
        return None


def _session(policy: str = "fail") -> Session:
    return Session(_cache(policy), NoGraphs())


def _manager(
    budget: int | Fraction | None = None, free_bytes: Callable[[], int] = free_memory_bytes, *, evicts: bool = False
) -> SessionPool:
    mode = CacheMode("adaptive" if evicts else "always", 0, (budget or 1 << 40) if evicts else budget, free_bytes)
    return SessionPool(_session, mode)


def _run(held: Session, tokens: list[int]) -> None:
    """What a graph would do, one token a step."""
    for token in tokens:
        held.cache.window(1)
        held.cache.commit(1)
        held.tokens.append(token)


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("always", CacheMode("always")),
        ("always(64MiB)", CacheMode("always", budget=64 << 20)),
        ("long-sequence-only(256)", CacheMode("long-sequence-only", 256)),
        ("adaptive", CacheMode("adaptive")),
        ("adaptive(1.5GB)", CacheMode("adaptive", budget=1_500_000_000)),
        ("adaptive(25%)", CacheMode("adaptive", budget=Fraction(1, 4))),
        ("adaptive", CacheMode("adaptive", budget=Fraction(1, 2))),
        ("disabled", CacheMode("disabled")),
    ],
)
def test_a_mode_is_what_its_text_says(text: str, mode: CacheMode) -> None:
    assert CacheMode.parse(text) == mode
    assert CacheMode.parse(str(mode)) == mode


@pytest.mark.parametrize(
    "text", ["", "never", "disabled(1)", "long-sequence-only", "long-sequence-only(x)", "long-sequence-only(-1)"]
)
def test_what_is_no_mode_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"cache mode: got .* expected always, long-sequence-only"):
        CacheMode.parse(text)


@pytest.mark.parametrize("text", ["", "x", "-1", "1e9", "5 parsecs", "0", "0%", "101%"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="memory budget"):
        parse_budget(text)


def test_a_threshold_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"got long-sequence-only\(0\); expected a threshold of at least 1"):
        CacheMode.parse("long-sequence-only(0)")


def test_computing_anew_beyond_a_sliding_window_is_refused() -> None:
    sliding = _cache("sliding-window")
    CacheMode("long-sequence-only", 12).check(sliding)
    CacheMode("disabled").check(_cache())
    for mode in (CacheMode("long-sequence-only", 13), CacheMode("disabled")):
        with pytest.raises(UsageError, match="got the context policy sliding-window; expected fail, or at most 12"):
            mode.check(sliding)


def test_a_sequence_is_found_again() -> None:
    manager = _manager()
    assert manager.get(7) is None
    held = manager.get_or_create(7)
    _run(held, [1, 2, 3])
    assert manager.get(7) is manager.get_or_create(7) is held
    manager.get_or_create(2**64 - 1)
    stats = manager.stats
    assert (stats.total_sequences, stats.total_bytes, stats.total_tokens) == (2, 2 * BYTES, 3)
    assert (stats.average_length, stats.lookups, stats.hits, stats.hit_rate) == (1.5, 5, 2, 0.4)
    assert stats.used_bytes == 3 * GEOMETRY.tensors * GEOMETRY.row_bytes
    assert stats.efficiency == stats.used_bytes / stats.total_bytes
    assert manager.memory_bytes == stats.total_bytes


def test_an_empty_manager_has_figures_too() -> None:
    stats = _manager().stats
    assert (stats.average_length, stats.hit_rate, stats.efficiency) == (0, 0, 0)


@pytest.mark.parametrize("sequence", [-1, 2**64, True, 1.0, "7"])
def test_what_is_no_64_bit_id_is_refused(sequence: int) -> None:
    with pytest.raises(UsageError, match="sequence: got"):
        _manager().get_or_create(sequence)


def test_a_dropped_sequence_is_gone_with_its_memory() -> None:
    manager = _manager()
    memory = weakref.ref(manager.get_or_create(1).cache)
    assert manager.drop(1)
    assert memory() is None
    assert not manager.drop(1)
    assert manager.memory_bytes == 0


def test_beyond_the_budget_a_new_sequence_is_refused() -> None:
    manager = _manager(2 * BYTES)
    manager.get_or_create(1)
    manager.get_or_create(2)
    with pytest.raises(MemoryBudgetError, match=f"got {BYTES:,} bytes for a new one beside {2 * BYTES:,} held"):
        manager.get_or_create(3)
    assert manager.ids == [1, 2]


def test_under_pressure_the_min_recently_used_give_way() -> None:
    manager = _manager(2 * BYTES, evicts=True)
    for sequence in (1, 2, 1, 3):
        manager.get_or_create(sequence)
    assert manager.ids == [1, 3]
    assert manager.stats.evictions == 1


def test_what_never_fits_is_refused_before_anything_gives_way() -> None:
    free = 4 * BYTES
    manager = _manager(Fraction(1, 2), lambda: free, evicts=True)
    manager.get_or_create(1)
    free = 0
    with pytest.raises(MemoryBudgetError, match=f"got {BYTES:,} bytes for a new one; expected at most {BYTES // 2:,}"):
        manager.get_or_create(2)
    assert manager.ids == [1]


def test_memory_that_others_take_is_made_up_for() -> None:
    free = 100 * BYTES
    manager = _manager(Fraction(1, 2), lambda: free, evicts=True)
    for sequence in range(4):
        manager.get_or_create(sequence)
    free = 0  # half of the four that are held
    manager.get(0)
    assert len(manager) == 4
    manager.get_or_create(1)
    assert manager.ids == [0, 1]
    free = -4 * BYTES
    manager.get_or_create(1)
    assert manager.ids == [1]  # the one in use stays, however great the pressure


def test_free_memory_is_read_only_where_a_cache_is_made_or_could_be_freed() -> None:
    reads = 0

    def free() -> int:
        nonlocal reads
        reads += 1
        return 100 * BYTES

    manager = _manager(Fraction(1, 2), free, evicts=True)
    counts = []
    for sequence in (1, 1, 1, 2, 1):
        manager.get_or_create(sequence)
        counts.append(reads)
    assert counts == [1, 1, 1, 2, 3]


@given(st.lists(st.tuples(st.sampled_from(["get", "create", "drop"]), st.integers(0, 5)), max_size=40))
@at_most(60)
def test_a_manager_does_what_an_ordered_list_does(calls: list[tuple[str, int]]) -> None:
    manager = _manager(3 * BYTES, evicts=True)
    held: list[int] = []
    for call, sequence in calls:
        if call == "drop":
            assert manager.drop(sequence) == (sequence in held)
        elif call == "create":
            manager.get_or_create(sequence)
        else:
            assert (manager.get(sequence) is not None) == (sequence in held)
        was_held = sequence in held
        held = [other for other in held if other != sequence]
        if call == "create" or (call == "get" and was_held):
            held = [*held, sequence][-3:]
        assert manager.ids == held
        assert manager.memory_bytes == len(held) * BYTES


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@given(TOKENS, TOKENS)
def test_the_common_beginning_is_kept(before: list[int], after: list[int]) -> None:
    held = _session()
    _run(held, before)
    start = held.reuse(after)
    common = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    assert start == min(common, len(before), len(after) - 1)
    assert held.tokens == after[:start]
    assert held.cache.tokens_seen == held.cache.length == start


@given(st.integers(16, 30), st.integers(0, 3))
def test_a_window_that_slid_is_extended_or_dropped(run: int, dropped: int) -> None:
    held = _session("sliding-window")
    tokens = list(range(run))
    _run(held, tokens)
    assert held.reuse([*tokens[: run - dropped], 99]) == (0 if dropped else run)


def test_a_cache_that_was_used_past_its_sequence_is_dropped() -> None:
    held = _session()
    _run(held, [1, 2, 3])
    held.cache.reset()
    assert held.reuse([1, 2, 3, 4]) == 0


MOST = 4
NOBODY = None, None
RUNNING = Sequence(Request((1,)), Setup("cpu", "slot", None, "always"))


def _roomy(sessions: int = 99) -> SessionPool:
    return _manager(max(1, sessions * BYTES))


def _take(pool: SessionPool, tokens: list[int], owner: str | None = None, most: int = MOST) -> int:
    """The id for a text, whose tokens then are in its session."""
    found = pool.choose(tokens, (owner, None), most)
    assert found is not None
    pool.take(found, RUNNING)
    pool.get_or_create(found).tokens = list(tokens)
    return found


def _ask(pool: SessionPool, tokens: list[int], owner: str | None = None, most: int = MOST) -> int:
    """A request from its start to its end."""
    found = _take(pool, tokens, owner, most)
    pool.release(RUNNING, found)
    return found


def test_a_conversation_goes_on_in_its_own_cache():
    pool = _roomy()
    first, second = _ask(pool, [1, 2, 3]), _ask(pool, [4, 5, 6])
    assert first != second
    assert _ask(pool, [1, 2, 3, 7, 8]) == first and _ask(pool, [4, 5, 6, 9]) == second
    assert _ask(pool, [1, 2, 3, 7, 9]) == first  # another answer to the same question
    assert len(pool) == 2


def test_a_cache_is_not_given_up_for_a_shorter_prefix():
    """Its tokens are worth more than the few that are shared; those come from the prefix cache."""
    pool = _roomy()
    long = _ask(pool, [1, 2, 3, 4, 5, 6, 7])
    assert _ask(pool, [1, 2, 8]) != long
    held = pool.get(long)
    assert held is not None and held.tokens == [1, 2, 3, 4, 5, 6, 7]


def test_a_cache_of_which_half_is_shared_goes_on():
    pool = _roomy()
    half = _ask(pool, [1, 2, 3, 4])
    assert _ask(pool, [1, 2, 8]) == half and _ask(pool, [1, 9]) != half  # a third of it


def test_busy_caches_are_left_alone():
    pool = _roomy()
    busy = _take(pool, [1, 2], most=2)
    assert pool.taken == 1
    other = pool.choose([1, 2, 3], NOBODY, 2)
    assert other is not None and other != busy
    pool.take(other, RUNNING)
    assert pool.choose([1, 2, 4], NOBODY, 2) is None
    pool.release(RUNNING, busy)
    assert pool.choose([1, 2, 4], NOBODY, 2) == busy


def test_the_min_recently_used_one_makes_room():
    pool = _roomy()
    first = _ask(pool, [1, 1], most=2)
    _ask(pool, [2, 2], most=2)
    _ask(pool, [1, 1, 1], most=2)
    third = _ask(pool, [3, 3], most=2)
    assert sorted(pool.ids) == [first, third]


def test_memory_is_a_limit_too():
    pool = _roomy(1)
    first = _take(pool, [1], most=8)
    assert pool.choose([2], NOBODY, 8) is None  # nothing idle could make room
    pool.release(RUNNING, first)
    assert pool.choose([2], NOBODY, 8) is not None and first not in pool
    assert _roomy(0).choose([1], NOBODY, 1) is not None  # `get_or_create` refuses it by name


def test_nobody_continues_the_cache_of_another():
    pool = _roomy()
    mine = _ask(pool, [1, 2, 3], "a")
    assert _ask(pool, [1, 2, 3], "b") != mine and _ask(pool, [1, 2, 3], None) != mine
    assert _ask(pool, [1, 2, 3], "a") == mine


def test_an_id_is_never_used_again():
    pool = _roomy()
    ids = [_ask(pool, [number], most=1) for number in range(1, 6)]
    assert len({*ids}) == len(ids) and len(pool) == 1


def test_a_sequence_that_has_no_tokens_is_forgotten():
    pool = _roomy()
    found = pool.choose([1, 2], NOBODY, MOST)
    assert found is not None
    pool.take(found, RUNNING)
    pool.release(RUNNING, found)
    assert pool.choose([1, 2], NOBODY, 1) is not None, "it takes no room"
    pool = _roomy()
    evicted = _take(pool, [1, 2])
    pool.drop(evicted)
    pool.release(RUNNING, evicted)
    _ask(pool, [1, 2])
    pool.forget_idle()
    assert len(pool) == 0 and pool.taken == 0


def test_common_tokens():
    assert common_tokens([1, 2, 3], [1, 2, 4]) == 2 and common_tokens([], [1]) == 0
    assert common_tokens([1, 2], [1, 2, 3]) == 2 and common_tokens([2], [1]) == 0


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_common_tokens_end_where_texts_differ(same, one, other):
    common = common_tokens([*same, *one], (*same, *other))
    assert common >= len(same) and [*same, *one][:common] == [*same, *other][:common]
    assert [*same, *one][common : common + 1] != [*same, *other][common : common + 1] or common == len(same + one)
