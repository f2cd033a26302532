"""Rows of gated delta rules and Mamba-2, and their matrices, against a list of tokens and the recurrence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from msgspec import structs
from numpy.typing import NDArray

from edgekv.kv import KVCache, LayeredGeometry, Rows, StateError
from edgekv.plan.cache import CHOICES, Choice, count_traffic
from edgekv.spec import CHECKPOINT_TOKENS, ConvolutionStates, DeltaRule, DeltaSpec
from quant import Encoding

RULE = DeltaRule(frozenset({0, 1}), 4, 1, 2, 4, 3)
MAMBA = structs.replace(RULE, corrects=False)
ZERO = 32768
HELD = Encoding("u16", 1e-4, ZERO)


def cache_of(
    ar: int = 24, strategy: str = "pointer-shift", reserve: Any = None, *, rule: DeltaRule = RULE, context: int = 512
) -> KVCache:
    states = ConvolutionStates(RULE.layers, 4, RULE.channels)
    geometry = LayeredGeometry(3, context, (1,), (4,), states=states, delta_rule=rule)
    tensors = [tensor for group in geometry.groups() for tensor in group.names()]
    return KVCache(geometry, ar=(1, ar), encodings=[HELD] * len(tensors), strategy=strategy, reserve=reserve)


class Plain:
    """What a cache must hold, kept as a list of tokens' rows: S is computed anew from all of them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Rows]] = []

    def tail(self, name: str) -> Rows:
        held = [row[name] for row in self.rows[len(self.rows) // CHECKPOINT_TOKENS * CHECKPOINT_TOKENS :]]
        return np.array(held, np.uint16)


def run(cache: KVCache, plain: Plain, random: np.random.Generator, ar: int, kept: int) -> None:
    """A step whose graph writes random rows, of which the first are kept."""
    windows = cache.window(ar)
    step: list[dict[str, Rows]] = [{} for _ in range(ar)]
    for group, window in zip(cache.groups, windows, strict=True):
        for arena in group.arenas:
            for at, tensor in enumerate(arena.tensors):
                if not tensor.is_written:
                    continue
                width, low = group.geometry.width, -3000 if tensor.kind == "decay" else -9000
                rows = ZERO + random.integers(low, 1 if tensor.kind == "decay" else 9000, (ar, width))
                rows = rows.astype(arena.dtype)
                place = arena.array if window.in_place else arena.scratch
                place[at, window.new_row : window.new_row + ar] = rows
                for row, each in zip(step, rows, strict=True):
                    row[tensor.past] = each
    cache.commit(kept)
    plain.rows += step[:kept]


def values(held: Rows) -> NDArray[np.float64]:
    return (held.astype(np.float64) - ZERO) * 1e-4


def check(cache: KVCache, plain: Plain, rule: DeltaRule = RULE) -> None:
    """Rows since the checkpoint are those of the list, and S is the recurrence's."""
    state = cache.state.rows
    for layer in RULE.layers:
        for name in (f"delta_key_state_{layer}_in", f"delta_value_state_{layer}_in", f"decay_state_{layer}_h1_in"):
            wanted = plain.tail(name)
            assert np.array_equal(state[name].ravel(), wanted.ravel())
        done = plain.rows[: len(plain.rows) // CHECKPOINT_TOKENS * CHECKPOINT_TOKENS]
        matrix = np.zeros((RULE.value_heads, RULE.key_dim, RULE.value_dim))
        for row in done:
            k, d = (values(row[f"delta_{kind}_state_{layer}_in"]) for kind in ("key", "value"))
            g = values(np.array([row[f"decay_state_{layer}_h{head}_in"][0] for head in range(RULE.value_heads)]))
            added = k[None, :, None] * d.reshape(RULE.value_heads, 1, -1)
            matrix = matrix * np.exp(g)[:, None, None] + (added if rule.corrects else added * g[:, None, None])
        found = values(state[f"recurrent_state_{layer}_in"]).reshape(RULE.key_dim, RULE.value_heads, -1).swapaxes(0, 1)
        assert np.abs(found - matrix).max(initial=0) <= 1e-4 * (1 + len(done) // CHECKPOINT_TOKENS)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([RULE, MAMBA]),
    st.integers(0, 1 << 30),
    st.lists(st.tuples(st.sampled_from(["step", "rewind", "restore"]), st.integers(0, 90)), max_size=25),
)
def test_a_cache_holds_what_a_list_of_tokens_holds(rule: DeltaRule, seed: int, calls: list[tuple[str, int]]) -> None:
    random, cache, plain, restored = np.random.default_rng(seed), cache_of(rule=rule), Plain(), False
    for call, number in calls:
        if call == "step" and cache.room(24):
            run(cache, plain, random, 24, min(number, 24, cache.step_tokens))
        elif call == "rewind":
            wanted = max(0, len(plain.rows) - number)
            reached = cache.rewind_to(wanted)
            assert reached in (wanted, 0) and (reached or restored or number > CHECKPOINT_TOKENS or not wanted)
            del plain.rows[reached:]
        else:
            state = cache.state
            cache.reset()
            cache.restore(state)
            restored = True  # the convolution before the rule has no rows then but its state
        check(cache, plain, rule)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_plan_counts_the_memory_and_the_copies_that_a_cache_makes(choice: Choice) -> None:
    cache, plain, random = cache_of(strategy=choice.strategy, reserve=choice.reserve), Plain(), np.random.default_rng(0)
    assert choice.held_bytes(cache.geometry, cache.ar) == cache.stats.bytes_held
    deltas = [group for group in cache.groups if isinstance(group.geometry, DeltaSpec)]
    wanted = [count_traffic(group.geometry, choice, 512, 24).filling_rows for group in deltas]
    for _ in range(511):
        run(cache, plain, random, 1, 1)
    copied = [sum(arena.bytes_copied for arena in group.arenas) for group in deltas]
    sizes = [group.geometry.tensors * group.geometry.row_bytes for group in deltas]
    assert copied == [rows * size for rows, size in zip(wanted, sizes, strict=True)]


def test_matrices_of_the_older_checkpoint_count_where_it_can_be_reached() -> None:
    cache, plain, random = cache_of(8), Plain(), np.random.default_rng(0)
    (matrices,) = (group for group in cache.groups if getattr(group.geometry, "kind", "") == "recurrent")
    one = matrices.nbytes
    for _ in range(CHECKPOINT_TOKENS // 8):
        assert matrices.nbytes == one == 2 * RULE.key_dim * RULE.values * 2
        run(cache, plain, random, 8, 8)
    assert matrices.nbytes == 2 * one
    assert cache.rewind_to(CHECKPOINT_TOKENS - 4) == CHECKPOINT_TOKENS - 4
    del plain.rows[-4:]
    check(cache, plain)
    assert matrices.nbytes == one


def test_a_step_beyond_a_checkpoint_is_refused() -> None:
    cache, plain, random = cache_of(), Plain(), np.random.default_rng(0)
    run(cache, plain, random, 24, 24)
    run(cache, plain, random, 24, 24)
    cache.window(24)
    with pytest.raises(ValueError, match="expected 0 to 16"):
        cache.commit(24)


def test_a_state_of_other_keys_is_refused_by_its_sizes() -> None:
    """The matrices of both have the same."""
    with pytest.raises(StateError, match="state: geometry: got"):
        cache_of().restore(cache_of(rule=structs.replace(RULE, key_heads=RULE.value_heads)).state)


@pytest.mark.parametrize("context", [32, 512])
def test_a_state_has_no_more_bytes_than_its_cache_says(context: int) -> None:
    cache, plain, random = cache_of(8, context=context), Plain(), np.random.default_rng(0)
    for _ in range(context // 8):
        run(cache, plain, random, 8, 8)
        state_bytes = sum(rows.nbytes for rows in cache.state.rows.values())
        assert state_bytes <= cache.max_state_bytes
    assert state_bytes > cache.max_state_bytes / 2


def test_a_state_of_another_number_of_tokens_is_refused() -> None:
    cache, plain, random = cache_of(), Plain(), np.random.default_rng(0)
    run(cache, plain, random, 24, 20)
    state = cache.state
    state.rows["delta_key_state_0_in"] = state.rows["delta_key_state_0_in"][:-1]  # type: ignore[index]
    with pytest.raises(StateError, match=r"delta_key_state_0_in: got uint16 \[19, 4\]; expected uint16 \[20, 4\]"):
        cache_of().restore(state)
