"""Similarity of the keys of a cache."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from edgekv.kv.arena import Rows


def mean_similarity(tensors: Iterable[tuple[Rows, int]]) -> NDArray[np.float64]:
    """Cosine similarity of each token's key to the mean key, averaged over key tensors, `[tokens]`.

    The mean is taken over keys normalized to unit length (arXiv 2504.15364). A cosine does not depend on the scale of
    an encoding; a key of zeros has similarity 0.

    Args:
        tensors: integers `[tokens, D]` and the zero point of each key tensor.
    """
    total: NDArray[np.float64] | None = None
    count = 0
    for integers, zero_point in tensors:
        keys = integers.astype(np.float32) - np.float32(zero_point)
        unit = keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), np.float32(1e-6))
        anchor = unit.mean(axis=0)
        cosines = (unit @ anchor / max(float(np.linalg.norm(anchor)), 1e-6)).astype(np.float64)
        total = cosines if total is None else total + cosines
        count += 1
    if total is None:
        raise ValueError("tensors: got none; expected the keys of at least one head")
    mean: NDArray[np.float64] = total / count
    return mean
