"""Eviction by score: which blocks go, and that attention over the rest is as if they had never been."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edgekv.paged import (
    CacheEvictionConfig,
    CacheEvictor,
    PagedInputError,
    ScoreLedger,
    paged_attention,
    rotation_trig_lut,
)

FREQUENCIES = [1.0, 0.3, 0.05, 0.002]
KV_HEADS, HEADS, SIZE, VALUE_SIZE = 2, 6, 8, 5


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def rope(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rows `[tokens, heads, SIZE]` of a model as it computes them for these positions, in float64."""
    angles = positions[:, None, None] * np.array(FREQUENCIES)
    x, y = np.split(rows.astype(np.float64), 2, axis=-1)
    return np.concatenate([x * np.cos(angles) - y * np.sin(angles), y * np.cos(angles) + x * np.sin(angles)], axis=-1)


def attention_over(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Output and weights `[HEADS, new, tokens]`, from scratch: token i at position i, queries are the last ones."""
    tokens, new = len(keys), len(queries)
    turned = rope(keys, np.arange(tokens))
    asked = rope(queries, np.arange(tokens - new, tokens))
    output, weights = np.zeros((new, HEADS, VALUE_SIZE)), np.zeros((HEADS, new, tokens))
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        for i in range(new):
            seen = tokens - new + i + 1
            logits = turned[:seen, kv_head] @ asked[i, head] / np.sqrt(SIZE)
            weights[head, i, :seen] = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            output[i, head] = weights[head, i] @ values[:, kv_head]
    return output, weights


class Sequence:
    """One sequence on the paged path, beside the list of its kept tokens as a model without any cache has them."""

    def __init__(self, config: CacheEvictionConfig, seed: int, blocks: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.evictor = CacheEvictor(config, FREQUENCIES)
        self.keys = np.full((blocks, KV_HEADS, config.block_tokens, SIZE), np.nan, np.float32)
        self.values = np.full((blocks, KV_HEADS, config.block_tokens, VALUE_SIZE), np.nan, np.float32)
        self.free = self.rng.permutation(blocks).astype(np.int32)
        self.table = int32()
        self.rotation: dict[str, Any] = {}
        self.kept_keys = np.zeros((0, KV_HEADS, SIZE), np.float32)
        self.kept_values = np.zeros((0, KV_HEADS, VALUE_SIZE), np.float32)
        self.weights = np.zeros(0)
        self.queries = np.zeros(0)

    def step(self, new: int, window: int) -> None:
        """A step of some tokens, compared with attention over the kept tokens from scratch."""
        queries = self.rng.standard_normal((new, HEADS, SIZE)).astype(np.float32)
        keys = self.rng.standard_normal((new, KV_HEADS, SIZE)).astype(np.float32)
        values = self.rng.standard_normal((new, KV_HEADS, VALUE_SIZE)).astype(np.float32)
        past = len(self.kept_keys)
        self.kept_keys, self.kept_values = np.append(self.kept_keys, keys, 0), np.append(self.kept_values, values, 0)
        wanted, weights = attention_over(queries, self.kept_keys, self.kept_values)

        needed = max(0, -(-(past + new) // self.keys.shape[2]) - len(self.table))
        self.table, self.free = np.append(self.table, self.free[:needed]), self.free[needed:]
        at = np.arange(past, past + new)
        output, scores = paged_attention(
            rope(queries, at).astype(np.float32).reshape(new, -1),
            rope(keys, at).astype(np.float32).reshape(new, -1),
            values.reshape(new, -1),
            self.keys,
            self.values,
            int32(past),
            int32(0, new),
            self.table,
            int32(0, len(self.table)),
            score_aggregation_window=window,
            **self.rotation,
        )
        np.testing.assert_allclose(output, wanted.reshape(new, -1), rtol=0, atol=1e-5)
        counted = weights[:, max(0, new - window) :]
        self.weights = np.append(self.weights, np.zeros(new)) + counted.sum((0, 1))
        self.queries = np.append(self.queries, np.zeros(new)) + (counted[0] > 0).sum(0)
        self.evictor.record(scores, new_tokens=new, aggregation_window=window)

    def evict(self) -> None:
        """Drop blocks here and there: the choice is checked against sums over the naive weights."""
        config, block_tokens = self.evictor.config, self.evictor.config.block_tokens
        eviction = self.evictor.evict(self.table)
        full = len(self.kept_keys) // block_tokens
        dropped = eviction.dropped.tolist()
        evictable = range(config.start_tokens // block_tokens, full - config.recent_tokens // block_tokens)
        assert len(dropped) == max(0, full - config.max_tokens // block_tokens)
        assert set(dropped) <= set(evictable)
        importance = self.weights / np.maximum(self.queries, 1) if "norm" in config.aggregation else self.weights
        sums = {b: float(importance[b * block_tokens : (b + 1) * block_tokens].sum()) for b in evictable}
        if dropped:
            stay = [score for block, score in sums.items() if block not in dropped]
            assert max(sums[block] for block in dropped) <= min(stay, default=np.inf) + 1e-5

        assert eviction.freed_blocks.tolist() == self.table[dropped].tolist()
        tokens = [t for t in range(len(self.kept_keys)) if t // block_tokens not in dropped]
        self.kept_keys, self.kept_values = self.kept_keys[tokens], self.kept_values[tokens]
        self.weights, self.queries = self.weights[tokens], self.queries[tokens]
        assert eviction.past_tokens == self.evictor.tokens == len(tokens) < config.max_tokens + block_tokens
        self.table, self.free = eviction.block_indices, np.append(self.free, eviction.freed_blocks)
        self.keys[eviction.freed_blocks] = self.values[eviction.freed_blocks] = np.nan
        self.rotation = {
            "rotated_block_indices": eviction.rotated_block_indices,
            "rotation_deltas": eviction.rotation_deltas,
            "rotation_trig_lut": eviction.rotation_trig_lut,
        }


@pytest.mark.slow
@settings(max_examples=60)
@given(
    block_tokens=st.integers(1, 4),
    areas=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3)),
    aggregation=st.sampled_from(["sum", "normalized sum"]),
    steps=st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0, 1, 3, 100])), min_size=2, max_size=8),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_after_evictions_is_that_over_the_kept_tokens_from_scratch(
    block_tokens, areas, aggregation, steps, seed
):
    start, recent, between = areas
    config = CacheEvictionConfig.in_blocks(
        start, recent, start + recent + between, block_tokens=block_tokens, aggregation=aggregation
    )
    sequence = Sequence(config, seed, blocks=24)
    for new, window in steps:
        sequence.step(new, window)
        sequence.evict()


def test_a_hundred_evictions_do_not_add_up_to_an_error():
    sequence = Sequence(CacheEvictionConfig.in_blocks(1, 2, 6, block_tokens=4), seed=5, blocks=16)
    for _ in range(400):
        sequence.step(1, 1)
        sequence.evict()


def evictor_with(scores: list[float]) -> CacheEvictor:
    config = CacheEvictionConfig.in_blocks(1, 1, 3, block_tokens=2, aggregation="sum")
    evictor = CacheEvictor(config, FREQUENCIES)
    evictor.record(np.array(scores, np.float32), new_tokens=len(scores))
    return evictor


def test_the_weakest_block_between_start_and_recent_goes_and_the_rest_moves_up():
    evictor = evictor_with([0, 0, 5, 5, 1, 1, 4, 4, 3, 0, 9])
    eviction = evictor.evict(int32(10, 11, 12, 13, 14, 15, 16))
    assert eviction.dropped.tolist() == [2, 3]
    assert eviction.freed_blocks.tolist() == [12, 13]
    assert eviction.block_indices.tolist() == [10, 11, 14, 15, 16]
    assert eviction.past_tokens == 7
    assert eviction.rotated_block_indices.tolist() == [14, 15]
    assert eviction.rotation_deltas.tolist() == [[4], [4]]
    assert eviction.rotation_deltas.dtype == eviction.block_indices.dtype == np.int32
    np.testing.assert_array_equal(eviction.rotation_trig_lut, rotation_trig_lut(FREQUENCIES, 5))
    assert evictor.evict(eviction.block_indices).dropped.tolist() == []


def test_of_equal_blocks_the_oldest_goes():
    assert evictor_with([1.0] * 10).evict(int32(0, 1, 2, 3, 4)).dropped.tolist() == [1, 2]


def test_nothing_goes_before_a_block_more_than_the_maximum_is_full():
    assert evictor_with([1.0] * 7).evict(int32(0, 1, 2, 3)).dropped.size == 0
    assert evictor_with([1.0] * 8).evict(int32(0, 1, 2, 3)).dropped.tolist() == [1]


def test_a_normalized_sum_divides_by_the_queries_that_saw_the_token():
    ledgers = [ScoreLedger("sum"), ScoreLedger("normalized sum")]
    for ledger in ledgers:
        ledger.add(np.array([4.0, 2.0, 1.0]), new_tokens=3, aggregation_window=2)
        ledger.add(np.array([1.0, 1.0, 1.0, 3.0]), new_tokens=1)
    assert ledgers[0].block_scores(1).tolist() == [5, 3, 2, 3]
    assert ledgers[1].block_scores(1).tolist() == [5 / 3, 3 / 3, 2 / 2, 3 / 1]


def test_a_row_of_the_table_undoes_as_many_positions():
    rows = np.random.default_rng(0).standard_normal((1, 1, SIZE))
    cos, sin = np.split(rotation_trig_lut(FREQUENCIES, 8, np.float64)[7], 2)
    x, y = np.split(rope(rows, np.array([30])), 2, axis=-1)
    back = np.concatenate([x * cos - y * sin, x * sin + y * cos], axis=-1)
    np.testing.assert_allclose(back, rope(rows, np.array([23])), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("field", "sizes"),
    [
        ("start_tokens", (0, 8, 32, 8)),
        ("start_tokens", (4, 8, 32, 8)),
        ("recent_tokens", (8, -8, 32, 8)),
        ("recent_tokens", (8, 9, 32, 8)),
        ("max_tokens", (8, 8, 30, 8)),
        ("max_tokens", (8, 8, 16, 8)),
        ("block_tokens", (8, 8, 32, 0)),
        ("aggregation", (8, 8, 32, 8, "mean")),
    ],
)
def test_areas_that_make_no_sense_are_refused(field, sizes):
    with pytest.raises(ValueError, match=r": got .+; expected .+") as caught:
        CacheEvictionConfig(*sizes)
    assert isinstance(caught.value, PagedInputError)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("block_indices", lambda e: e.evict(int32(0, 1, 2, 3))),
        ("block_indices", lambda e: e.evict(int32(0, 1, 2, 3, 1))),
        ("block_indices", lambda e: e.evict(int32(0, 1, 2, 3, -1))),
        ("block_indices", lambda e: e.evict(np.arange(5))),
        ("scores", lambda e: e.record(np.ones(10), new_tokens=1)),
        ("scores", lambda e: e.record(np.full(11, np.nan), new_tokens=1)),
        ("scores", lambda e: e.record(-np.ones(11), new_tokens=1)),
        ("new_tokens", lambda e: e.record(np.ones(9), new_tokens=-1)),
        ("aggregation_window", lambda e: e.record(np.ones(11), new_tokens=1, aggregation_window=-1)),
    ],
)
def test_a_refused_call_of_the_evictor_changes_nothing(field, call):
    evictor = evictor_with([1.0] * 10)
    with pytest.raises(ValueError, match=r": got .+; expected .+") as caught:
        call(evictor)
    assert caught.value.field == field
    assert evictor.tokens == 10
    assert evictor.evict(int32(0, 1, 2, 3, 4)).dropped.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("inverse_frequencies", lambda: rotation_trig_lut([], 2)),
        ("inverse_frequencies", lambda: rotation_trig_lut([np.inf], 2)),
        ("rows", lambda: rotation_trig_lut([1.0], 0)),
        ("aggregation", lambda: ScoreLedger("mean")),
    ],
)
def test_what_no_table_or_ledger_can_be_made_of_is_refused(field, call):
    with pytest.raises(PagedInputError) as caught:
        call()
    assert caught.value.field == field
