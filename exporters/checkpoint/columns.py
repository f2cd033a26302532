"""Columns of the embedding table that are far larger than the others, where no rotation spreads them.

One scale for a row leaves their neighbours few of its 8 bits. So each column is divided by its size before rows are
rounded, and multiplied by it after they are looked up. A head with the same matrix has the factors in the last norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from edgekv.spec import EMBEDDING, FINAL_NORM, HEAD, View
from exporters.checkpoint.fold import Floats, Fold

_OUTLIER = 4.0
"""A column this many times larger than the median one costs the others two of their 8 bits."""

_MAX_OCTAVES = 15  # between the largest and the smallest factor: 16 bits represent all exactly
_ROWS_AT_ONCE = 8192


def blocks_of_rows(vocab: int) -> Iterator[slice]:
    """All rows of the table, as many at a time as are held in float32."""
    return (slice(first, first + _ROWS_AT_ONCE) for first in range(0, vocab, _ROWS_AT_ONCE))


class TableColumns:
    """Divides the columns of a table that the head shares, and multiplies the weights of the last norm.

    Args:
        factors: of columns, `[hidden]`; powers of 2.
    """

    def __init__(self, factors: Floats) -> None:
        self._factors = factors

    def __call__(self, view: View) -> Fold | None:
        """The fold of a tensor."""
        if view.name == HEAD:
            return Fold(in_map=lambda rows: rows / self._factors)
        return Fold(out_map=self._norm) if view.name == FINAL_NORM else None

    def _norm(self, weights: Floats) -> Floats:
        """The residual's weights, without those of copies behind them."""
        weights[: len(self._factors)] *= self._factors
        return weights


def outlier_columns(vocab: int, read: Callable[[str, slice], Floats]) -> Floats | None:
    """The root mean square of each column over the median one, as powers of 2, `[hidden]`; None without outliers.

    Args:
        vocab: rows of the table.
        read: some rows of a tensor, by name.
    """
    squares: NDArray[np.float64] = np.zeros(1)
    for rows in blocks_of_rows(vocab):
        squares = squares + np.square(read(EMBEDDING, rows), dtype=np.float64).sum(axis=0)
    sizes = np.sqrt(squares / vocab)
    median = float(np.median(sizes))
    if not float(sizes.max()) > _OUTLIER * median > 0:
        return None
    octaves = np.rint(np.log2(np.maximum(sizes / median, np.finfo(np.float32).tiny)))
    factors: Floats = np.exp2(np.maximum(octaves, octaves.max() - _MAX_OCTAVES)).astype(np.float32)
    return factors
