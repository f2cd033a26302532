"""The vectorized operator against loops over its definition, what it may touch, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from edgekv.kv import KVCache, RowSpec
from edgekv.paged import PagedInputError, attention, paged_attention, rotation_trig_lut


@dataclass
class Case:
    """All inputs of the operator, under its names."""

    query: NDArray[Any]
    key: NDArray[Any]
    value: NDArray[Any]
    key_cache: NDArray[Any]
    value_cache: NDArray[Any]
    past_lens: NDArray[np.int32]
    subsequence_begins: NDArray[np.int32]
    block_indices: NDArray[np.int32]
    block_indices_begins: NDArray[np.int32]
    scale: Any = None
    sliding_window: Any = None
    alibi_slopes: Any = None
    rotated_block_indices: Any = None
    rotation_deltas: Any = None
    rotation_trig_lut: Any = None
    score_aggregation_window: Any = None


def rotate_naively(case: Case, key_cache: NDArray[np.float64]) -> None:
    if case.rotated_block_indices is None:
        return
    _, kv_heads, block_tokens, size = key_cache.shape
    half = size // 2
    for turn, block in enumerate(case.rotated_block_indices):
        for slot in range(block_tokens):
            deltas = case.rotation_deltas[turn]
            row = case.rotation_trig_lut[deltas[slot if len(deltas) > 1 else 0]].astype(np.float64)
            for head in range(kv_heads):
                for i in range(half):
                    x, y = key_cache[block, head, slot, i], key_cache[block, head, slot, i + half]
                    key_cache[block, head, slot, i] = x * row[i] - y * row[i + half]
                    key_cache[block, head, slot, i + half] = x * row[i + half] + y * row[i]


def attend_naively(case: Case) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[Any]]:
    """Output, scores, and both caches as they are afterwards; the case itself stays as it is."""
    key_cache, value_cache = case.key_cache.astype(np.float64), case.value_cache.copy()
    _, kv_heads, block_tokens, size = key_cache.shape
    heads, value_size = case.query.shape[1] // size, value_cache.shape[3]
    scale = 1 / np.sqrt(size) if case.scale is None else float(case.scale)
    window = int(case.sliding_window or 0)
    sequences = len(case.past_lens)
    aggregation = np.broadcast_to(
        1 if case.score_aggregation_window is None else case.score_aggregation_window, sequences
    )

    def place(sequence: int, position: int) -> tuple[int, int]:
        entry = case.block_indices_begins[sequence] + position // block_tokens
        return int(case.block_indices[entry]), position % block_tokens

    rotate_naively(case, key_cache)
    for s in range(sequences):
        for i, row in enumerate(range(case.subsequence_begins[s], case.subsequence_begins[s + 1])):
            block, slot = place(s, int(case.past_lens[s]) + i)
            for head in range(kv_heads):
                key_cache[block, head, slot] = case.key[row, head * size : (head + 1) * size]
                value_cache[block, head, slot] = case.value[row, head * value_size : (head + 1) * value_size]

    output = np.zeros((len(case.query), heads * value_size))
    scores: list[float] = []
    for s in range(sequences):
        past, first = int(case.past_lens[s]), int(case.subsequence_begins[s])
        new = int(case.subsequence_begins[s + 1]) - first
        region = [0.0] * (past + new)
        for i in range(new):
            at = past + i
            oldest = max(0, at - window + 1) if window > 0 else 0
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                query = case.query[first + i, head * size : (head + 1) * size].astype(np.float64)
                logits = []
                for position in range(oldest, at + 1):
                    block, slot = place(s, position)
                    logit = scale * float(query @ key_cache[block, kv_head, slot])
                    if case.alibi_slopes is not None:
                        mine = head if len(case.alibi_slopes) == heads else kv_head
                        logit += float(case.alibi_slopes[mine]) * (position - at)
                    logits.append(logit)
                weights = np.exp(np.array(logits) - max(logits))
                weights /= weights.sum()
                for position, weight in enumerate(weights, oldest):
                    block, slot = place(s, position)
                    row = value_cache[block, kv_head, slot].astype(np.float64)
                    output[first + i, head * value_size : (head + 1) * value_size] += weight * row
                    if i >= new - aggregation[s]:
                        region[position] += float(weight)
        scores += region
    return output, np.array(scores), key_cache, value_cache


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@st.composite
def cases(draw: st.DrawFn, *, dtype: type = np.float32) -> Case:
    """A batch of up to four sequences; slots without a token hold NaN, and blocks are dealt in no order."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    block_tokens, size, value_size = draw(st.integers(1, 5)), draw(st.sampled_from([2, 4, 6])), draw(st.integers(1, 5))
    heads = kv_heads * groups
    lengths = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=4))
    spare = draw(st.integers(0, 2))
    counts = [-(-(past + new) // block_tokens) + draw(st.integers(0, spare)) for past, new in lengths]
    blocks = sum(counts) + draw(st.integers(0, 3))
    order = rng.permutation(blocks)
    past_lens, new = int32(*(p for p, _ in lengths)), [n for _, n in lengths]
    begins = int32(*np.cumsum([0, *new]))
    block_begins = int32(*np.cumsum([0, *counts]))
    table = order[: block_begins[-1]].astype(np.int32)
    tokens = int(begins[-1])

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    case = Case(
        query=normal(tokens, heads * size),
        key=normal(tokens, kv_heads * size),
        value=normal(tokens, kv_heads * value_size),
        key_cache=np.full((blocks, kv_heads, block_tokens, size), np.nan, dtype),
        value_cache=np.full((blocks, kv_heads, block_tokens, value_size), np.nan, dtype),
        past_lens=past_lens,
        subsequence_begins=begins,
        block_indices=table,
        block_indices_begins=block_begins,
        scale=draw(st.sampled_from([None, 0.3, -0.7, np.float32(1.5), np.array(0.5, np.float32)])),
        sliding_window=draw(st.sampled_from([None, 0, -1, 1, 2, 3, 7, 100, np.int32(4), np.array(5, np.int32)])),
        score_aggregation_window=draw(st.sampled_from([None, 0, 1, 3, 100, np.int32(2), "each"])),
    )
    if case.score_aggregation_window == "each":
        case.score_aggregation_window = rng.integers(0, 7, len(lengths)).astype(np.int32)
    if draw(st.booleans()):
        case.alibi_slopes = normal(draw(st.sampled_from([heads, kv_heads])))
    for s, (past, _) in enumerate(lengths):
        for position in range(past):
            block, slot = table[block_begins[s] + position // block_tokens], position % block_tokens
            case.key_cache[block, :, slot] = normal(kv_heads, size)
            case.value_cache[block, :, slot] = normal(kv_heads, value_size)
    if blocks and draw(st.booleans()):
        rotated = draw(st.integers(0, 4))
        angles = rng.uniform(-4, 4, (5, size // 2))
        case.rotated_block_indices = rng.integers(0, blocks, rotated).astype(np.int32)
        case.rotation_deltas = rng.integers(0, 5, (rotated, draw(st.sampled_from([1, block_tokens])))).astype(np.int32)
        case.rotation_trig_lut = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(dtype)
    return case


def run(case: Case) -> tuple[np.ndarray, np.ndarray]:
    return paged_attention(**{field.name: getattr(case, field.name) for field in fields(Case)})


def check(case: Case) -> None:
    """Output, scores and caches are those of the loops."""
    output, scores, key_cache, value_cache = attend_naively(case)
    found_output, found_scores = run(case)
    assert found_output.dtype == found_scores.dtype == case.query.dtype
    np.testing.assert_allclose(found_output, output, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found_scores, scores, rtol=0, atol=2e-5)
    np.testing.assert_allclose(case.key_cache, key_cache, rtol=0, atol=2e-6)
    assert np.array_equal(case.value_cache, value_cache, equal_nan=True)


@pytest.mark.slow
@settings(max_examples=100)
@given(cases())
def test_output_scores_and_caches_are_those_of_the_definition(case):
    """Slots without a token hold NaN in every case: one that is read would show."""
    check(case)


@settings(max_examples=50)
@given(cases(dtype=np.float64))
def test_float64_stays_float64(case):
    output, scores, *_ = attend_naively(case)
    found_output, found_scores = run(case)
    np.testing.assert_allclose(found_output, output, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found_scores, scores, rtol=0, atol=1e-12)


@settings(max_examples=50)
@given(cases(dtype=np.float16))
def test_float16_is_rounded_once(case):
    case.rotated_block_indices = case.rotation_deltas = case.rotation_trig_lut = None
    output, *_ = attend_naively(case)
    found, _ = run(case)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, output, rtol=1e-3, atol=1e-3)


@given(cases(), st.integers(1, 40))
def test_pieces_of_any_size_give_the_same(case, elements):
    whole = run(deepcopy(case))
    before, attention._PIECE_ELEMENTS = attention._PIECE_ELEMENTS, elements
    try:
        pieced = run(case)
    finally:
        attention._PIECE_ELEMENTS = before
    for one, other in zip(whole, pieced, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


@given(cases())
def test_only_new_tokens_and_rotated_blocks_change(case):
    before = deepcopy(case)
    run(case)
    written = np.zeros((len(case.key_cache), case.key_cache.shape[2]), bool)
    for s, past in enumerate(case.past_lens):
        for position in range(past, past + np.diff(case.subsequence_begins)[s]):
            entry = case.block_indices_begins[s] + position // written.shape[1]
            written[case.block_indices[entry], position % written.shape[1]] = True
    turned = written.copy()
    if case.rotated_block_indices is not None:
        turned[case.rotated_block_indices] = True
    for cache, old, touched in (
        (case.key_cache, before.key_cache, turned),
        (case.value_cache, before.value_cache, written),
    ):
        keep = ~touched[:, None, :, None] & np.ones(cache.shape, bool)
        assert cache[keep].tobytes() == old[keep].tobytes()


def small(**changes: Any) -> Case:
    """Two query heads on one KV head, 4 tokens to a block: 5 cached tokens and 2 new, then a prompt of 3."""
    rng = np.random.default_rng(7)
    case = Case(
        query=rng.standard_normal((5, 8)).astype(np.float32),
        key=rng.standard_normal((5, 4)).astype(np.float32),
        value=rng.standard_normal((5, 3)).astype(np.float32),
        key_cache=rng.standard_normal((5, 1, 4, 4)).astype(np.float32),
        value_cache=rng.standard_normal((5, 1, 4, 3)).astype(np.float32),
        past_lens=int32(5, 0),
        subsequence_begins=int32(0, 2, 5),
        block_indices=int32(3, 0, 4),
        block_indices_begins=int32(0, 2, 3),
    )
    return replace(case, **changes)


def rotation(blocks: tuple[int, ...], deltas: tuple[tuple[int, ...], ...]) -> dict[str, np.ndarray]:
    return {
        "rotated_block_indices": int32(*blocks),
        "rotation_deltas": np.array(deltas, np.int32),
        "rotation_trig_lut": rotation_trig_lut([1.0, 0.1], 4),
    }


def test_sequences_may_share_the_blocks_of_a_prefix():
    case = small(past_lens=int32(5, 4), block_indices=int32(3, 0, 3, 4), block_indices_begins=int32(0, 2, 4))
    check(case)


def test_a_block_listed_twice_is_rotated_twice():
    once, twice = small(**rotation((3,), ((3,),))), small(**rotation((3, 3), ((1,), (2,))))
    run(once)
    run(twice)
    np.testing.assert_allclose(once.key_cache, twice.key_cache, rtol=0, atol=2e-6)


def test_a_delta_for_each_slot_equals_one_for_the_block():
    block, slots = small(**rotation((3,), ((2,),))), small(**rotation((3,), ((2, 2, 2, 2),)))
    run(block)
    run(slots)
    assert np.array_equal(block.key_cache, slots.key_cache)


def test_new_tokens_put_into_a_rotated_block_are_not_rotated():
    case = small(**rotation((0,), ((3,),)))
    run(case)
    assert np.array_equal(case.key_cache[0, 0, 1:3], case.key[:2])


def test_scores_sum_to_heads_times_queries():
    _, scores = run(small(score_aggregation_window=int32(2, 1)))
    np.testing.assert_allclose([scores[:7].sum(), scores[7:].sum()], [2 * 2, 2 * 1], rtol=0, atol=1e-6)


def test_an_empty_batch_gives_empty_results():
    case = small(
        query=np.zeros((0, 8), np.float32),
        key=np.zeros((0, 4), np.float32),
        value=np.zeros((0, 3), np.float32),
        past_lens=int32(),
        subsequence_begins=int32(0),
        block_indices=int32(),
        block_indices_begins=int32(0),
    )
    output, scores = run(case)
    assert output.shape == (0, 6)
    assert scores.shape == (0,)


def test_caches_may_be_views_of_one_array():
    case = small()
    both = np.stack([case.key_cache[..., :3], case.value_cache], axis=1)
    case = replace(case, query=case.query[:, :6].copy(), key=case.key[:, :3].copy())
    apart = replace(case, key_cache=both[:, 0].copy(), value_cache=both[:, 1].copy())
    together = replace(case, key_cache=both[:, 0], value_cache=both[:, 1])
    assert np.array_equal(run(apart)[0], run(together)[0])
    assert np.array_equal(both[:, 0], apart.key_cache)


@pytest.mark.parametrize("strategy", ["pointer-shift", "slot"])
def test_blocks_cut_from_the_kv_manager_give_the_attention_of_its_windows(strategy):
    """Contiguous: all S columns of a graph with its mask. Paged: the rows held, in blocks of 4, shuffled."""
    rng = np.random.default_rng(3)
    geometry = RowSpec(layers=1, kv_heads=2, head_dim=8, window=24)
    cache = KVCache(geometry, ar=[1, 5], strategy=strategy, policy="sliding-window")
    arena = cache.arena
    for ar in (5, 5, 5, 1, 5, 5, 1, 5, 1):
        (window,) = cache.window(ar)
        held = cache.held_rows()
        new = rng.integers(0, 256, (geometry.tensors, ar, 8)).astype(np.uint8)
        landing = arena.array if window.in_place else arena.scratch
        landing[:, window.new_row : window.new_row + ar] = new
        query = rng.standard_normal((ar, 4, 8)).astype(np.float32)

        past = arena.array[:, window.past_row : window.past_row + 24 - ar]
        columns = (np.concatenate([past, new], axis=1).astype(np.float32) - 128) * np.float32(0.02)
        mask = np.full((ar, 24), -np.inf)
        mask[:, window.first : window.stop] = 0
        mask[:, 24 - ar :][np.tri(ar, dtype=bool)] = 0
        wanted = np.empty((ar, 4, 8))
        for head in range(4):
            logits = query[:, head] @ columns[head // 2].T / np.sqrt(8) + mask
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            wanted[:, head] = weights / weights.sum(-1, keepdims=True) @ columns[2 + head // 2]

        # A full window leaves out the oldest of the S-1 tokens held.
        seen = held[len(held) - (window.stop - window.first) :]
        blocks = -(-(len(seen) + ar) // 4)
        order = rng.permutation(blocks)
        paged = np.full((2, blocks, 2, 4, 8), np.nan, np.float32)
        rows = (arena.array[:, seen].astype(np.float32) - 128) * np.float32(0.02)
        at = np.arange(len(seen))
        paged[:, order[at // 4], :, at % 4] = rows.reshape(2, 2, -1, 8).transpose(2, 0, 1, 3)
        tokens = ((new.astype(np.float32) - 128) * np.float32(0.02)).reshape(2, 2, ar, 8).transpose(0, 2, 1, 3)
        output, _ = paged_attention(
            query.reshape(ar, -1),
            *tokens.reshape(2, ar, -1),
            *paged,
            int32(len(seen)),
            int32(0, ar),
            order.astype(np.int32),
            int32(0, blocks),
        )
        np.testing.assert_allclose(output, wanted.reshape(ar, -1), rtol=0, atol=1e-5)
        cache.commit(ar)


def float32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


TURN = rotation((3,), ((1,),))
REFUSED: list[tuple[str, Callable[[Case], dict[str, Any]]]] = [
    ("query", lambda c: {"query": c.query.astype(np.float64)}),
    ("query", lambda c: {"query": c.query.tolist()}),
    ("query", lambda c: {"query": c.query[:, :7]}),
    ("query", lambda c: {"query": c.query[:, :0]}),
    ("query", lambda c: {"query": c.query[None]}),
    ("query", lambda c: {"key_cache": float32(5, 3, 4, 4), "value_cache": float32(5, 3, 4, 3)}),
    ("key", lambda c: {"key": c.key[:4]}),
    ("key", lambda c: {"key": float32(5, 8)}),
    ("key", lambda c: {"key": c.key.astype(np.float16)}),
    ("value", lambda c: {"value": c.value[:4]}),
    ("value", lambda c: {"value": float32(5, 4)}),
    ("key_cache", lambda c: {"key_cache": c.key_cache.astype(np.int8)}),
    ("key_cache", lambda c: {"key_cache": c.key_cache.tolist()}),
    ("key_cache", lambda c: {"key_cache": c.key_cache[0]}),
    ("key_cache", lambda c: {"key_cache": c.key_cache[:, :, :0]}),
    ("key_cache", lambda c: {"key_cache": read_only(c.key_cache)}),
    ("value_cache", lambda c: {"value_cache": c.value_cache[:4]}),
    ("value_cache", lambda c: {"value_cache": c.value_cache.astype(np.float64)}),
    ("value_cache", lambda c: {"value_cache": c.key_cache}),
    ("value_cache", lambda c: {"value_cache": read_only(c.value_cache)}),
    ("past_lens", lambda c: {"past_lens": int32(5, -1)}),
    ("past_lens", lambda c: {"past_lens": np.array([5, 0])}),
    ("past_lens", lambda c: {"past_lens": [5, 0]}),
    ("past_lens", lambda c: {"past_lens": int32(5)[None]}),
    ("subsequence_begins", lambda c: {"past_lens": int32(5, 0, 0)}),
    ("subsequence_begins", lambda c: {"subsequence_begins": int32(0, 2, 4)}),
    ("subsequence_begins", lambda c: {"subsequence_begins": int32(1, 2, 5)}),
    ("subsequence_begins", lambda c: {"subsequence_begins": int32(0, 6, 5)}),
    ("subsequence_begins", lambda c: {"subsequence_begins": c.subsequence_begins.astype(np.float32)}),
    ("block_indices", lambda c: {"block_indices": int32(3, 5, 4)}),
    ("block_indices", lambda c: {"block_indices": int32(3, -1, 4)}),
    ("block_indices", lambda c: {"block_indices": c.block_indices.astype(np.int64)}),
    ("block_indices", lambda c: {"past_lens": int32(7, 0)}),
    ("block_indices", lambda c: {"past_lens": int32(2**31 - 1, 0)}),
    ("block_indices", lambda c: {"block_indices_begins": int32(0, 1, 3)}),
    ("block_indices_begins", lambda c: {"block_indices_begins": int32(0, 3, 2)}),
    ("block_indices_begins", lambda c: {"block_indices_begins": int32(0, 2, 4)}),
    ("block_indices_begins", lambda c: {"block_indices_begins": int32(0, 3)}),
    ("scale", lambda c: {"scale": float("nan")}),
    ("scale", lambda c: {"scale": "1"}),
    ("scale", lambda c: {"scale": float32(2)}),
    ("sliding_window", lambda c: {"sliding_window": -2}),
    ("sliding_window", lambda c: {"sliding_window": 3.0}),
    ("sliding_window", lambda c: {"sliding_window": True}),
    ("sliding_window", lambda c: {"sliding_window": int32(3)}),
    ("alibi_slopes", lambda c: {"alibi_slopes": float32(3)}),
    ("alibi_slopes", lambda c: {"alibi_slopes": np.zeros(2)}),
    ("alibi_slopes", lambda c: {"alibi_slopes": float32(2) + np.inf}),
    ("score_aggregation_window", lambda c: {"score_aggregation_window": -1}),
    ("score_aggregation_window", lambda c: {"score_aggregation_window": int32(1, -1)}),
    ("score_aggregation_window", lambda c: {"score_aggregation_window": int32(1, 1, 1)}),
    ("score_aggregation_window", lambda c: {"score_aggregation_window": 1.5}),
    ("rotation_deltas", lambda c: {"rotated_block_indices": int32(3)}),
    ("rotated_block_indices", lambda c: {**TURN, "rotated_block_indices": None}),
    ("rotation_trig_lut", lambda c: {**TURN, "rotation_trig_lut": None}),
    ("rotated_block_indices", lambda c: {**TURN, "rotated_block_indices": int32(5)}),
    ("rotated_block_indices", lambda c: {**TURN, "rotated_block_indices": int32(-1)}),
    ("rotation_deltas", lambda c: {**TURN, "rotated_block_indices": int32(3, 0)}),
    ("rotation_deltas", lambda c: {**TURN, "rotation_deltas": int32(1)}),
    ("rotation_deltas", lambda c: {**TURN, "rotation_deltas": np.zeros((1, 2), np.int32)}),
    ("rotation_deltas", lambda c: {**TURN, "rotation_deltas": int32(4)[None]}),
    ("rotation_deltas", lambda c: {**TURN, "rotation_deltas": int32(-1)[None]}),
    ("rotation_trig_lut", lambda c: {**TURN, "rotation_trig_lut": float32(4, 2)}),
    ("rotation_trig_lut", lambda c: {**TURN, "rotation_trig_lut": np.zeros((4, 4))}),
    (
        "key_cache",
        lambda c: {
            **TURN,
            "query": c.query[:, :6],
            "key": c.key[:, :3],
            "key_cache": c.key_cache[..., :3],
            "rotation_trig_lut": float32(4, 3),
        },
    ),
]


@pytest.mark.parametrize(("field", "change"), REFUSED)
@pytest.mark.parametrize("rotated", [False, True])
def test_bad_input_is_named_and_changes_nothing(field, change, rotated):
    case = small(**(TURN if rotated and "rotat" not in field else {}))
    keys, values = case.key_cache, case.value_cache
    before = keys.tobytes(), values.tobytes()
    with pytest.raises(ValueError, match=r": got .+; expected .+") as caught:
        run(replace(case, **change(case)))
    assert isinstance(caught.value, PagedInputError)
    assert caught.value.field == field
    assert (keys.tobytes(), values.tobytes()) == before
