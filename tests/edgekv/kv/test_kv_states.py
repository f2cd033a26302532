"""The states of convolutions against a plain list of rows, and a cache that has both states and rows."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edgekv.kv import (
    STRATEGIES,
    TAIL_TOKENS,
    KeyDiff,
    KVCache,
    KvTensor,
    LayeredGeometry,
    Sinks,
    StateError,
    StateGroup,
    read_state,
    state_rows,
    write_state,
)
from edgekv.spec.geometry import ConvSpec, DeltaSpec
from edgekv.spec.layers import ConvolutionStates

WIDTH = 16
CONTEXT = 24


def states(kernel: int, kv_dtype: str = "u8", width: int = WIDTH) -> ConvSpec:
    return ConvSpec(2, width, kernel, kv_dtype, (0, 2))


def hybrid(kernel: int = 3, context: int = CONTEXT, **changes) -> LayeredGeometry:
    """Layers 0 and 2 with states, 1 and 3 with attention."""
    return LayeredGeometry(
        4, context, (1,), (8,), states=ConvolutionStates(frozenset({0, 2}), kernel, WIDTH), **changes
    )


def rows_at(arena, address: int, offset: int, rows: int, width: int) -> np.ndarray:
    """What a graph sees that is bound to an address."""
    size = rows * width * arena.dtype.itemsize
    buffer = (ctypes.c_uint8 * size).from_address(address + offset)
    return np.frombuffer(buffer, arena.dtype).reshape(rows, width)


class Steps:
    """A stand-in for graphs: row t of tensor i is filled with a number of its own, and every past is checked."""

    def __init__(self, group: StateGroup, kernel: int) -> None:
        self.group, self.kernel = group, kernel
        self.text: list[int] = []
        self.serial = 0

    def value(self, token: int, tensor: int) -> int:
        return (token * 7 + tensor * 3) % 101 + 1

    def step(self, ar: int, kept: list[int]) -> None:
        """An AR-`ar` graph, of which some rows are kept; the others are rejected drafts or padding."""
        group, (arena,) = self.group, self.group.arenas
        window = group.window(ar, 1 << 10)
        assert (window.columns, window.first, window.stop) == (self.kernel - 1, 0, self.kernel - 1)
        tokens = [self.serial + row for row in range(ar)]
        self.serial += ar
        for at in range(len(arena.tensors)):
            past = rows_at(arena, arena.addresses[at], arena.past_offset_bytes(window), window.columns, WIDTH)
            padded = [None] * (self.kernel - 1) + self.text
            wanted = [
                group.geometry.zero_point if token is None else self.value(token, at)
                for token in padded[len(padded) - (self.kernel - 1) :]
            ]
            assert past.min(1).tolist() == past.max(1).tolist() == wanted
            new = rows_at(arena, arena.new_addresses(window)[at], arena.new_offset_bytes(window), ar, WIDTH)
            for row, token in enumerate(tokens):
                new[row] = self.value(token, at)
        gap = next((at for at, row in enumerate(kept) if row != at), len(kept))
        if gap < len(kept):
            group.compact(gap, kept[gap:])
        group.commit(len(kept))
        self.text += [tokens[row] for row in kept]


def group_of(strategy: str, kernel: int, max_ar: int, kv_dtype: str = "u8") -> StateGroup:
    geometry = states(kernel, kv_dtype)
    return StateGroup(geometry, state_rows(strategy, geometry, max_ar=max_ar, reserve=1.25), max_ar)


EVENTS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 9), st.integers(0, 1 << 9)),
    st.tuples(st.just("rewind"), st.integers(0, 90), st.just(0)),
    st.tuples(st.just("snapshot"), st.just(0), st.just(0)),
    st.tuples(st.just("restore"), st.just(0), st.just(0)),
    st.tuples(st.just("drop"), st.integers(1, 9), st.just(0)),
    st.tuples(st.just("reset"), st.just(0), st.just(0)),
)


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=60, deadline=None)
@given(kernel=st.integers(2, 7), kv_dtype=st.sampled_from(["u8", "s8", "s16"]), events=st.lists(EVENTS, max_size=60))
def test_every_order_of_calls_agrees_with_a_list_of_rows(strategy, kernel, kv_dtype, events):
    """Kernels wider than a step, rejected rows, rewinds within the tail, snapshots taken and restored at any time."""
    group = group_of(strategy, kernel, 9, kv_dtype)
    steps = Steps(group, kernel)
    kept: tuple[dict, list[int]] | None = None
    for event, size, bits in events:
        if event == "step":
            steps.step(size, [row for row in range(size) if bits >> row & 1])
        elif event == "drop":  # a step that is opened and never committed
            group.window(size, 1 << 10)
        elif event == "rewind":
            size = min(size, len(steps.text), group.length)
            if group.can_rewind(size, len(steps.text)):
                group.rewind(size)
                del steps.text[len(steps.text) - size :]
            else:
                assert group.length - size < kernel - 1 <= TAIL_TOKENS
        elif event == "snapshot":
            kept = dict(group.snapshot()), list(steps.text)
        elif event == "restore" and kept is not None:
            group.check(kept[0], len(kept[1]))
            group.restore(kept[0])
            steps.text = list(kept[1])
        elif event == "reset":
            group.reset()
            steps.text = []
        steps.step(1, [0])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_can_be_rewound_by_its_tail_and_no_further(strategy):
    group = group_of(strategy, 3, 4)
    steps = Steps(group, 3)
    for _ in range(200):
        steps.step(4, [0, 1, 2])
    assert group.can_rewind(TAIL_TOKENS, 600) and not group.can_rewind(group.length - 1, 600)
    group.rewind(TAIL_TOKENS)
    del steps.text[-TAIL_TOKENS:]
    steps.step(4, [0, 2, 3])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_across_the_end_of_the_memory_can_be_rewound(strategy):
    """Wherever a step of several rows lies in it, the rows before a rewind are read again."""
    group = group_of(strategy, 3, 9)
    steps = Steps(group, 3)
    for number in range(120):
        steps.step(9, [*range(9)])
        size = 1 + number % 8
        group.rewind(size)
        del steps.text[-size:]
        steps.step(1, [0])


@pytest.mark.parametrize(("strategy", "copies", "rows"), [("slot", 2, 3), ("mirror", 0, 0)])
def test_a_decode_step_copies_what_the_strategy_says(strategy, copies, rows):
    """`slot` copies the new row to older ones, and moves the state of two; `mirror` moves a pointer."""
    group = group_of(strategy, 3, 4)
    steps, (arena,) = Steps(group, 3), group.arenas
    steps.step(4, [0, 1, 2, 3])
    before = arena.copies, arena.bytes_copied
    for _ in range(10):
        steps.step(1, [0])
    assert arena.copies - before[0] == 10 * copies
    assert arena.bytes_copied - before[1] == 10 * rows * 2 * WIDTH


def test_pointer_shift_copies_a_state_only_where_its_memory_ends():
    group = group_of("pointer-shift", 3, 4)
    steps, (arena,) = Steps(group, 3), group.arenas
    for _ in range(1000):
        steps.step(1, [0])
    assert arena.copies <= 1000 * 4 // TAIL_TOKENS


def filled(cache: KVCache, tokens: int) -> KVCache:
    random = np.random.default_rng(tokens)
    for _ in range(tokens):
        windows = cache.window(1)
        for group, window in zip(cache.groups, windows, strict=True):
            for arena in group.arenas:
                place = arena.array if window.in_place else arena.scratch
                place[:, window.new_row % place.shape[1]] = random.integers(0, 200, place[:, 0].shape)
        cache.commit(1)
    return cache


def same(first: KVCache, second: KVCache) -> bool:
    a, b = first.state.rows, second.state.rows
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rewind_within_the_tail_is_exact_and_one_beyond_it_starts_again(strategy):
    cache = KVCache(hybrid(context=256), ar=(1, 4), strategy=strategy)
    earlier = filled(cache, 100).state
    assert filled(cache, 50).rewind_to(150) == 150
    assert cache.rewind_to(100) == 100
    assert all((rows == earlier.rows[name]).all() for name, rows in cache.state.rows.items())
    assert cache.rewind_to(10) == 0 and cache.length == 0


def test_rewind_to_is_checked_before_anything_changes():
    cache = filled(KVCache(hybrid(), ar=(1,)), 5)
    with pytest.raises(ValueError, match="rewind_to: got 6 tokens; expected 0 to 5"):
        cache.rewind_to(6)
    assert cache.tokens_seen == 5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_saved_state_goes_on_where_it_was(tmp_path, strategy):
    cache = filled(KVCache(hybrid(), ar=(1, 4), strategy=strategy), 9)
    write_state(cache.state, tmp_path / "saved", fingerprint="model")
    other = KVCache(hybrid(), ar=(1, 4), strategy=strategy)
    other.restore(read_state(tmp_path / "saved", fingerprint="model"))
    assert same(cache, other)
    assert other.state.rows[KvTensor(0, "conv", 0).past].shape == (2, WIDTH)


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (hybrid(kernel=4), "geometry"),
        (LayeredGeometry(4, CONTEXT, (1,), (8,)), "geometry"),
        (hybrid(kv_dtype="s16"), "geometry"),
    ],
)
def test_a_saved_state_of_other_kinds_or_sizes_is_refused_and_nothing_changes(saved, words):
    cache = filled(KVCache(hybrid(), ar=(1,)), 5)
    with pytest.raises(StateError, match=words):
        cache.restore(filled(KVCache(saved, ar=(1,)), 5).state)
    assert cache.tokens_seen == 5


@pytest.mark.parametrize("policy", ["sliding-window", Sinks(2, 8, (0.1,)), KeyDiff(12, 2)])
def test_policies_evict_tokens_and_leave_states_alone(policy):
    cache = KVCache(hybrid(), ar=(1, 4), policy=policy)
    filled(cache, 100)
    (state,) = [group for group in cache.groups if group not in cache.row_groups]
    assert cache.length < CONTEXT and state.length > CONTEXT
    assert cache.rewind_to(99) == 0


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ConvSpec(2, WIDTH, 1), "kernel"),
        (lambda: ConvSpec(2, 0, 3), "width"),
        (lambda: DeltaSpec(2, "delta_key", 2, WIDTH), "kind"),
        (lambda: DeltaSpec(2, "conv", 1, WIDTH), "kind"),
        (lambda: DeltaSpec(2, "recurrent", 1, WIDTH, 0), "rows"),
        (lambda: DeltaSpec(2, "decay", 3, 1, numbers=(1,)), "numbers"),
    ],
)
def test_sizes_that_make_no_state_are_refused(make, field):
    with pytest.raises(ValueError, match=f"{field}: got"):
        make()


def test_states_alone_are_put_back_and_read_by_the_next_token():
    cache, other = filled(KVCache(hybrid(), ar=(1, 4)), 9), filled(filled(KVCache(hybrid(), ar=(1, 4)), 4), 5)
    states, rows = cache.states(9), other.state.rows
    assert any((rows[name] != values).any() for name, values in states.items())
    other.load_states(states)
    changed = other.state.rows
    assert all((changed[name] == states.get(name, values)).all() for name, values in rows.items())
    assert np.array_equal(other.newest_states, np.stack([*states.values()]))


def test_the_next_token_reads_the_zero_point_where_no_token_was():
    cache = filled(KVCache(hybrid(), ar=(1, 4)), 1)
    newest, rows = cache.newest_states, cache.states(1)
    assert (newest[:, :-1] == 1 << 15).all()  # u16
    assert np.array_equal(newest[:, -1:], np.stack([*rows.values()]))
