"""The operator's options as numbers for every sequence, head and query."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgekv.paged.arrays import Ints, check_array, check_finite, check_integer, check_range, check_shape, shape_text
from edgekv.paged.caches import Caches
from edgekv.paged.errors import PagedInputError


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """Options of one attention call besides softmax(q k) v.

    Attributes:
        scale: factor of q k.
        window: number of positions that a query sees, including its own; None for all.
        slopes: ALiBi, `[H]`: added to a logit times (key position - query position); None for none.
        scored: `[B]`, maximum number of a sequence's last queries that the scores sum over.
    """

    scale: float
    window: int | None
    slopes: NDArray[np.float64] | None
    scored: Ints

    @classmethod
    def of(
        cls,
        caches: Caches,
        heads: int,
        sequences: int,
        scale: object,
        sliding_window: object,
        alibi_slopes: object,
        score_aggregation_window: object,
    ) -> Options:
        """The options given by the operator's optional inputs.

        Raises:
            PagedInputError: one is of another type or shape, not finite, or a negative window other than the -1 of
                sliding_window.
        """
        number = caches.key_size**-0.5 if scale is None else check_finite("scale", scale, "or None for 1/sqrt(S)")
        window = 0
        if sliding_window is not None:
            window = check_integer("sliding_window", sliding_window, -1, "where 0 and -1 turn it off")
        scored = _scored(sequences, score_aggregation_window)
        return cls(number, window if window > 0 else None, _slopes(caches, heads, alibi_slopes), scored)


def _slopes(caches: Caches, heads: int, argument: object) -> NDArray[np.float64] | None:
    if argument is None:
        return None
    slopes: NDArray[np.float64] = check_array("alibi_slopes", argument, caches.dtype, 1).astype(np.float64)
    if len(slopes) not in (heads, caches.kv_heads):
        expected = f"[{heads}] or [{caches.kv_heads}], one for each query head or KV head"
        raise PagedInputError("alibi_slopes", got=shape_text(slopes.shape), expected=expected)
    if not np.isfinite(slopes).all():
        raise PagedInputError("alibi_slopes", got=slopes.tolist(), expected="finite numbers")
    return np.repeat(slopes, heads // len(slopes))


def _scored(sequences: int, argument: object) -> Ints:
    field = "score_aggregation_window"
    if isinstance(argument, np.ndarray) and argument.ndim:
        scored: Ints = check_array(field, argument, np.int32, 1).astype(np.int64)
        check_shape(field, scored, (sequences,), "one for each sequence")
        check_range(field, scored, 0, None, "queries")
        return scored
    queries = 1 if argument is None else check_integer(field, argument, 0, "queries of each sequence, or an array [B]")
    return np.full(sequences, queries, np.int64)
