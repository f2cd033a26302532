"""PagedAttention with one loop for each index of its definition, in float64: what the vectorized one is held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
