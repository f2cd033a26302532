"""Policies that choose who leaves: which tokens stay, where they stand, and what rotating their keys costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgekv.errors import UsageError
from edgekv.kv import KeyDiff, KVCache, RowSpec, Sinks
from edgekv.kv.policies.text import parse_policy, policy_text
from quant import Encoding
from tests.edgekv.kv.test_kv_state import MADE
from tests.support.kv_graph import rows_of
from tests.support.thorough import at_most

D, CONTEXT = 16, 40
FREQUENCIES = tuple(10000.0 ** (-i / (D // 2)) for i in range(D // 2))


class Model:
    """Tokens with random keys, written as a graph would: rotated to the cache's position and rounded."""

    def __init__(self, made=MADE[0], *, policy, kv_dtype="u8", ar=(1, 4), **options):
        strategy, key_layout = made
        geometry = RowSpec(2, 2, D, CONTEXT, kv_dtype, key_layout)
        self.cache = KVCache(geometry, ar=ar, strategy=strategy, policy=policy, **options)
        self.zero, self.reach = (128, 70) if kv_dtype == "u8" else (0, 20000)
        self.random = np.random.default_rng(0)
        self.held: list[tuple[int, dict]] = []
        self.count = 0

    def step(self, ar: int, tokens: int) -> None:
        (window,) = self.cache.window(ar)
        position = self.cache.position
        for store in self.cache.arenas:
            for tensor, base in enumerate(store.new_addresses(window)):
                rows = rows_of(store, tensor, base + store.new_offset_bytes(window), store.new_shape(ar))
                for row in range(tokens):
                    rows[row] = self.row(store.tensors[tensor], self.count + row, position + row)
        self.cache.commit(tokens)
        self.count += tokens

    def raw(self, tensor, token: int) -> np.ndarray:
        seed = [token, tensor.layer, tensor.head, tensor.kind == "key"]
        return np.random.default_rng(seed).uniform(-self.reach, self.reach, D)

    def row(self, tensor, token: int, position: int) -> np.ndarray:
        raw = self.raw(tensor, token)
        if tensor.kind == "key":
            angles = position * np.asarray(FREQUENCIES)
            first, second = np.split(raw, 2)
            cos, sin = np.cos(angles), np.sin(angles)
            raw = np.concatenate((first * cos - second * sin, second * cos + first * sin))
        return np.rint(raw) + self.zero

    def check(self, wanted: list[int], rotations: int) -> None:
        """Each token's rows are those of its age, but for the rounding of so many rotations."""
        rows = self.cache.held_rows()
        for store in self.cache.arenas:
            for at, tensor in enumerate(store.tensors):
                exact = np.array([self.row(tensor, token, age) for age, token in enumerate(wanted)]).reshape(-1, D)
                found = store.read(at, rows).astype(np.float64)
                # Each rotation rounds once more, and rotates what was rounded before; the first rounding is one too.
                slack = 1.5 * (rotations + 1) if tensor.kind == "key" else 0
                assert np.abs(found - exact).max(initial=0) <= slack


@pytest.mark.slow
@at_most(60)
@given(
    made=st.sampled_from(MADE),
    sinks=st.integers(1, 6),
    window=st.integers(1, 30),
    kv_dtype=st.sampled_from(["u8", "s16"]),
    steps=st.lists(st.tuples(st.sampled_from([1, 4]), st.integers(0, 4)), min_size=20, max_size=80),
)
def test_sinks_keep_the_first_and_the_newest_at_new_positions(made, sinks, window, kv_dtype, steps):
    model = Model(made, policy=Sinks(sinks, window, FREQUENCIES), kv_dtype=kv_dtype)
    cache, wanted, rotations = model.cache, [], 0
    for ar, fill in steps:
        if len(wanted) > CONTEXT - ar:
            wanted = wanted[:sinks] + wanted[-window:]
            rotations += 1
        new = min(ar, fill)
        wanted += range(model.count, model.count + new)
        model.step(ar, new)
        assert cache.position == cache.length == len(wanted) <= CONTEXT
        assert cache.tokens_seen == model.count
    model.check(wanted, rotations)
    assert cache.positions == list(range(len(wanted)))


def test_the_error_of_rotated_keys_is_rounding_and_is_reported():
    encodings = [Encoding("u8", 0.01, 128)] * 8
    model = Model(policy=Sinks(2, 20, FREQUENCIES), encodings=encodings)
    for _ in range(200):
        model.step(1, 1)
    cost = model.cache.stats.requantization
    assert cost.keys == model.cache.stats.evicted // 18 * 20 * 4
    assert 0.2 < cost.rms_steps < 0.3
    assert cost.max_steps <= 0.5
    assert cost.rms == pytest.approx(cost.rms_steps * 0.01)
    assert cost.clipped == 0
    held = [*range(2), *range(model.count - model.cache.length + 2, model.count)]
    model.check(held, model.cache.stats.evicted // 18)


def test_keys_beyond_the_integers_are_counted_as_clipped():
    model = Model(policy=Sinks(2, 20, FREQUENCIES))
    model.reach = 127
    for _ in range(100):
        model.step(1, 1)
    assert model.cache.stats.requantization.clipped > 0
    assert model.cache.stats.requantization.rms is None


def plain_keydiff(keys: list[np.ndarray], budget: int, recent: int) -> list[int]:
    """Ages that stay, of keys `[tokens, D]` by tensor."""
    scores = np.zeros(len(keys[0]))
    for tensor in keys:
        unit = tensor / np.linalg.norm(tensor, axis=1, keepdims=True)
        mean = unit.mean(axis=0)
        scores += unit @ mean / np.linalg.norm(mean)
    max_alike = np.argsort(-scores[: len(scores) - recent], kind="stable")[: len(scores) - budget]
    return [age for age in range(len(scores)) if age not in max_alike]


@pytest.mark.thorough
@pytest.mark.slow
@at_most(40)
@given(
    made=st.sampled_from(MADE),
    budget=st.integers(4, 36),
    recent=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from([1, 4]), st.integers(0, 4)), min_size=20, max_size=80),
)
def test_keydiff_keeps_the_keys_min_like_the_mean_and_absolute_positions(made, budget, recent, steps):
    model = Model(made, policy=KeyDiff(budget, recent))
    cache, wanted = model.cache, []
    for ar, fill in steps:
        if len(wanted) > CONTEXT - ar:
            keys = [
                np.array([model.row(tensor, token, token) - 128 for token in wanted])
                for tensor in cache.geometry.names()
                if tensor.kind == "key"
            ]
            wanted = [wanted[age] for age in plain_keydiff(keys, budget, recent)]
        new = min(ar, fill)
        wanted += range(model.count, model.count + new)
        model.step(ar, new)
        assert cache.positions == wanted
        assert cache.position == cache.tokens_seen == model.count
    rows = cache.held_rows()
    for store in cache.arenas:
        for at, tensor in enumerate(store.tensors):
            exact = np.array([model.row(tensor, token, token) for token in wanted]).reshape(-1, D)
            assert np.array_equal(store.read(at, rows), exact)
    assert cache.stats.requantization is None


@pytest.mark.parametrize(("budget", "leaving"), [(5, [1]), (4, [1, 3]), (3, [1, 2, 3])])
def test_the_max_similar_keys_leave_and_of_equal_ones_the_older(budget, leaving):
    similarity = [0.1, 0.9, 0.5, 0.9, 0.95, 0.8]
    assert KeyDiff(budget, recent=2).leaving(6, lambda: similarity) == leaving


@pytest.mark.parametrize("policy", [Sinks(3, 10, FREQUENCIES), KeyDiff(13, 10)])
def test_a_rewind_never_crosses_a_token_that_was_evicted(policy):
    model = Model(policy=policy)
    for _ in range(41):
        model.step(1, 1)
    assert (model.cache.length, model.cache.stats.evicted) == (14, 27)
    with pytest.raises(ValueError, match=r"got 14 tokens; expected 0 to 1\d, the tokens held in a row"):
        model.cache.rewind(14)
    before = model.cache.position
    model.cache.rewind(11)
    assert model.cache.position == before - 11
    model.step(4, 4)
    assert model.cache.length == 7


def test_a_state_of_another_policy_goes_on():
    first, second = Model(policy=KeyDiff(13, 4)), Model(("slot", "rows"), policy=Sinks(3, 10, FREQUENCIES))
    for _ in range(60):
        first.step(1, 1)
    second.cache.restore(first.cache.state)
    second.count = first.count
    assert second.cache.positions == first.cache.positions
    for _ in range(60):
        second.step(1, 1)
    assert second.cache.positions == list(range(second.cache.length))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Sinks(0, 10, FREQUENCIES), r"sinks: got 0 first and 10 newest tokens; expected at least 1 of each, and 36"),
        (Sinks(4, 33, FREQUENCIES), r"got 4 first and 33 newest tokens; expected .*36 together at most.*AR-4"),
        (Sinks(4, 10, (1.0,) * 9), r"got 9 inverse frequencies; expected 1 to 8, half of head_dim"),
        (KeyDiff(37, 4), r"keydiff: got a budget of 37 tokens, 4 of them recent; expected 1 to 36 tokens"),
        (KeyDiff(10, 11), r"got a budget of 10 tokens, 11 of them recent"),
        (KeyDiff(10, 0), r"0 of them recent"),
    ],
)
def test_numbers_that_leave_no_room_are_refused(policy, message):
    with pytest.raises(UsageError, match=message):
        Model(policy=policy)


def test_one_first_and_one_newest_token_are_enough():
    model = Model(policy=Sinks(1, 1, FREQUENCIES))
    for _ in range(10):
        model.step(1, 1)
    assert model.cache.positions == list(range(model.cache.length))


@pytest.mark.parametrize("policy", [Sinks(4, 60, FREQUENCIES), KeyDiff(64, 8)])
def test_a_policy_is_read_as_it_was_written(policy):
    assert parse_policy(policy_text(policy), FREQUENCIES) == policy
    with pytest.raises(UsageError, match=r"context policy: got '.*x\)'"):
        parse_policy(policy_text(policy).replace(")", "x)"), FREQUENCIES)
