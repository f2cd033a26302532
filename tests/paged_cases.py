"""Random inputs of paged attention, drawn so that every option and shape meets every other."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from paged_naive import Case


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
