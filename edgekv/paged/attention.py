"""OpenVINO's PagedAttention operator in numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.paged.arrays import Floats, check_array, check_shape, shape_text
from edgekv.paged.batch import Batch, Span
from edgekv.paged.caches import Caches
from edgekv.paged.errors import PagedInputError
from edgekv.paged.options import Options
from edgekv.paged.rotation import Rotation

# One MiB: KV heads and queries are processed in pieces that fit a core's own cache. Small pieces of
# a long prompt also skip more of the keys that their queries do not see.
_PIECE_ELEMENTS = 1 << 17


def paged_attention(
    query: Floats,
    key: Floats,
    value: Floats,
    key_cache: Floats,
    value_cache: Floats,
    past_lens: NDArray[np.int32],
    subsequence_begins: NDArray[np.int32],
    block_indices: NDArray[np.int32],
    block_indices_begins: NDArray[np.int32],
    scale: float | NDArray[Any] | None = None,
    sliding_window: int | NDArray[Any] | None = None,
    alibi_slopes: Floats | None = None,
    rotated_block_indices: NDArray[np.int32] | None = None,
    rotation_deltas: NDArray[np.int32] | None = None,
    rotation_trig_lut: Floats | None = None,
    score_aggregation_window: int | NDArray[Any] | None = None,
) -> tuple[Floats, Floats]:
    """Attention of a batch of sequences over keys and values in blocks.

    In this order: the cached keys of the given blocks are rotated, the new keys and values are written into the
    blocks of their positions, and each new token attends to its sequence up to itself. Semantics are those of
    OpenVINO 2026.4's PagedAttention on the CPU. T new tokens of B sequences in one batch, prompts and single tokens
    mixed, empty sequences allowed; H query heads, of which H/Hk share a KV head; bs tokens per block. All float
    tensors are of one type, float16, float32 or float64; results are computed in float64 and rounded once.

    Args:
        query: `[T, H*S]`.
        key: `[T, Hk*S]`, rotated to the tokens' positions if the model uses rotary embedding.
        value: `[T, Hk*Sv]`.
        key_cache: `[num_blocks, Hk, bs, S]`, updated in place.
        value_cache: `[num_blocks, Hk, bs, Sv]`, updated in place.
        past_lens: `[B]` int32, tokens of each sequence in the cache. New token i of a sequence has position past+i.
        subsequence_begins: `[B+1]` int32, each sequence's first row of `query`; the last is T.
        block_indices: `[n]` int32, the concatenated block tables of the sequences: position p is in slot p % bs of the
            table's block p // bs. Tables may be longer than needed and share blocks with others; where two sequences
            write one slot, the later one's token stays.
        block_indices_begins: `[B+1]` int32, each sequence's first entry of `block_indices`; the last is n.
        scale: factor of query times key; 1/sqrt(S) if None.
        sliding_window: positions that a query sees, its own included; 0, -1 or None for all.
        alibi_slopes: `[H]` or `[Hk]`; slope * (key position - query position) is added to the scaled product, with
            a sliding window too (where OpenVINO's CPU kernel leaves it out).
        rotated_block_indices: `[m]` int32, blocks to rotate, once per entry; requires the next two.
        rotation_deltas: `[m, 1]` or `[m, bs]` int32, rows of the table for each block or each slot.
        rotation_trig_lut: `[M, S]`, S/2 cosines, then S/2 sines, of the angle by which a pair (i, i + S/2) is rotated.
        score_aggregation_window: number of a sequence's last queries that the scores sum over, one number or `[B]`
            int32; 1 if None.

    Returns:
        The output `[T, H*Sv]`, and the scores `[sum(past_lens) + T]`: for each token of each sequence, the sum of its
        attention weights over all heads of the last queries.

    Raises:
        PagedInputError: inputs are inconsistent or out of range (a ValueError); nothing is changed.
    """
    caches = Caches(key_cache, value_cache)
    heads = _check_tokens(caches, query, key, value)
    batch = Batch.of(caches, len(query), past_lens, subsequence_begins, block_indices, block_indices_begins)
    options = Options.of(caches, heads, len(batch), scale, sliding_window, alibi_slopes, score_aggregation_window)
    rotation = Rotation.of(caches, rotated_block_indices, rotation_deltas, rotation_trig_lut)
    queries = query.reshape(len(query), caches.kv_heads, heads // caches.kv_heads, caches.key_size)
    output = np.empty((*queries.shape[:3], caches.value_size), caches.dtype)
    scores = np.zeros(batch.scores)

    if rotation:
        rotation.apply(caches)
    caches.insert(key, value, batch.new_places())
    for span, scored in zip(batch, options.scored, strict=True):
        if span.new:
            rows = slice(span.row, span.row + span.new)
            region = slice(span.score, span.score + span.past + span.new)
            _attend(caches, span, queries[rows], options, int(scored), output[rows], scores[region])
    return output.reshape(len(query), heads * caches.value_size), scores.astype(caches.dtype)


def _check_tokens(caches: Caches, query: object, key: object, value: object) -> int:
    """H, after a check of the new tokens' types and shapes."""
    rows = check_array("query", query, caches.dtype, 2)
    heads, rest = divmod(rows.shape[1], caches.key_size)
    if rest or not heads or heads % caches.kv_heads:
        expected = f"[T, H*S] with S = {caches.key_size} and H a multiple of the {caches.kv_heads} KV heads"
        raise PagedInputError("query", got=shape_text(rows.shape), expected=expected)
    for field, argument, size, symbol in (
        ("key", key, caches.key_size, "S"),
        ("value", value, caches.value_size, "Sv"),
    ):
        array = check_array(field, argument, caches.dtype, 2)
        check_shape(field, array, (len(rows), caches.kv_heads * size), f"[T, Hk*{symbol}]")
    return heads


def _attend(
    caches: Caches, span: Span, query: Floats, options: Options, scored: int, output: Floats, scores: Floats
) -> None:
    """Fill in `output` `[new, Hk, H/Hk, Sv]` of the queries `[new, Hk, H/Hk, S]`, and `scores` `[past+new]`.

    Query head h reads KV head h // (H/Hk), so heads are numbered by KV head and place in its group.
    """
    new, past, group = span.new, span.past, query.shape[2]
    window = options.window or past + new
    oldest = max(0, past + 1 - window)
    places = span.places(oldest, past + new)
    tokens = past + new - oldest
    pieces = list(_pieces(caches.kv_heads, tokens * max(caches.key_size, caches.value_size)))
    room = caches.room(pieces[0].stop, tokens)
    for heads in pieces:
        keys, values = caches.gather(places, heads, room)
        asked = query[:, heads].astype(np.float64).transpose(1, 2, 0, 3) * options.scale
        slopes = None if options.slopes is None else options.slopes.reshape(-1, group, 1, 1)[heads]
        for tile in _pieces(new, len(keys) * group * tokens):
            low, high = max(0, past + tile.start + 1 - window), past + tile.stop
            seen = slice(low - oldest, high - oldest)
            rows = asked[:, :, tile].reshape(len(keys), -1, caches.key_size)
            logits = (rows @ keys[:, seen].swapaxes(1, 2)).reshape(len(keys), group, -1, high - low)
            distance = np.arange(low, high) - np.arange(past + tile.start, high)[:, None]
            if slopes is not None:
                logits += slopes * distance
            if len(distance) > 1:
                np.copyto(logits, -np.inf, where=(distance > 0) | (distance <= -window))
            logits -= logits.max(axis=-1, keepdims=True)
            weights = np.exp(logits, out=logits)
            weights /= weights.sum(axis=-1, keepdims=True)
            scores[low:high] += weights[:, :, max(0, new - scored - tile.start) :].sum(axis=(0, 1, 2))
            mixed = weights.reshape(len(keys), -1, high - low) @ values[:, seen]
            output[tile, heads] = mixed.reshape(len(keys), group, -1, caches.value_size).transpose(2, 0, 1, 3)


def _pieces(count: int, elements: int) -> Iterator[slice]:
    """Splits `count` items so that about `_PIECE_ELEMENTS` elements are in memory at once."""
    step = max(1, _PIECE_ELEMENTS // elements)
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))
