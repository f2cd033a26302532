"""The inputs of matrices on calibration text, and the values that GPTQ derives from them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quant.cholesky import cholesky, corner_inverses, solve
from quant.products import in_threads, product

Floats = NDArray[np.float32]

_DAMPING = 0.1  # of the mean of the diagonal; a short calibration text needs more than the usual 0.01
_DRIFTING_DAMPING = 0.3  # with inputs that drifted, as 4 bits leave them: larger errors fit a short text more
_MIN_DRIFT = 3e-3  # of the inputs' energy; below it, what predicts the error on one text does not on others

_ROWS_AT_ONCE = 1024
_COLUMNS_AT_ONCE = 256


class Rows(Protocol):
    """Vectors of all tokens, `[tokens, width]`: an array, or what reads some of them at a time."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`[tokens, width]`."""
        ...

    def __getitem__(self, tokens: slice, /) -> Floats: ...


class LayerInputs:
    """Inputs of a matrix, or of several that share them, on all calibration tokens.

    Derived values are computed once, on first use, some tokens at a time: memory does not grow with the tokens.

    Args:
        exact: `[tokens, in]`, E, of the exact model.
        quantized: `[tokens, in]`, X, of the quantized model.
        missing: `[tokens, out]`, M, what the sums that the outputs are added to have too little; None for nothing.
    """

    def __init__(self, exact: Rows, quantized: Rows, missing: Rows | None = None) -> None:
        self._exact = exact
        self._quantized = quantized
        self._missing = missing

    @cached_property
    def importance(self) -> Floats:
        """`[in]`, the sum of squares of each input: the diagonal of H = X^T X."""
        squares = np.zeros(self._quantized.shape[1], np.float32)
        for tokens in self._tokens():
            rows = self._quantized[tokens]
            squares += np.einsum("ti,ti->i", rows, rows)
        return squares

    @property
    def damping(self) -> np.float32:
        """Added to the diagonal of H."""
        share = _DRIFTING_DAMPING if self._drifted else _DAMPING
        return np.float32(share * float(self.importance.mean()) + float(np.finfo(np.float32).tiny))

    @cached_property
    def order(self) -> NDArray[np.intp]:
        """`[in]`, the inputs by descending diagonal of H."""
        return np.argsort(self.importance, kind="stable")[::-1]

    @cached_property
    def factor(self) -> Floats:
        """`[in, in]`, the upper triangular U with U U^T = H + damping, rows and columns in `order`."""
        return cholesky(self.hessian.copy() if "hessian" in vars(self) else self._squares())

    @cached_property
    def hessian(self) -> Floats:
        """`[in, in]`, H + damping, rows and columns in `order`; cheap before `factor`, which overwrites the sums."""
        return product(self.factor, self.factor.T) if "factor" in vars(self) else self._squares()

    def _squares(self) -> Floats:
        """See `hessian`. Summed in the order of inputs, which need not be copied in another one, above the diagonal."""
        squares = np.zeros((len(self.order), len(self.order)), np.float32)
        columns = [slice(start, start + _COLUMNS_AT_ONCE) for start in range(0, len(squares), _COLUMNS_AT_ONCE)]
        for tokens in self._tokens():
            rows = self._quantized[tokens]

            def add(here: slice, rows: Floats = rows) -> None:
                squares[: here.stop, here] += product(rows[:, : here.stop].T, rows[:, here])

            for _ in in_threads(add, columns[::-1]):
                pass
        for here in columns:
            squares[here, : here.start] = squares[: here.start, here].T
        ordered: Floats = squares[np.ix_(self.order, self.order)]
        ordered[np.diag_indices(len(ordered))] += self.damping
        return ordered

    def compensated(self, weight: Floats, columns: slice) -> Floats:
        """Columns of W + (H + damping)^-1 X^T ((E - X) W + M), rows in `order`.

        On X, the outputs of these columns are closest to the outputs of W on E, and M: as in GPTAQ (arXiv 2504.02692),
        which has no M. If X hardly differs from E, as in models of 8 bits, W stays: on SmolLM2-135M the correction
        would cost other text a third more.

        Args:
            weight: `[in, out]`, W.
            columns: of `weight`.
        """
        (inputs, outputs), chosen = weight.shape, weight[:, columns]
        if not self._drifted:
            unchanged: Floats = chosen[self.order]
            return unchanged
        count = self._exact.shape[0]
        # Fewer products, unless another matrix with these inputs has needed them already.
        by_outputs = "_drift" not in vars(self) and 2 * count * outputs < count * inputs + inputs * outputs
        missing = np.zeros_like(chosen) if by_outputs else product(self._drift, chosen)
        for tokens in self._tokens() if by_outputs or self._missing is not None else ():
            difference = np.zeros((tokens.stop - tokens.start, chosen.shape[1]), np.float32)
            rows = self._quantized[tokens]
            if by_outputs:
                difference += product(self._exact[tokens] - rows, chosen)
            if self._missing is not None:
                difference += self._missing[tokens][:, columns]
            missing += product(rows.T, difference)
        target = solve(self.factor, self._inverses, missing[self.order])
        target += chosen[self.order]
        return target

    def making_up(self, weight: Floats) -> tuple[Floats, LayerInputs]:
        """A matrix `[in, out]` that is `compensated` as a whole, and the inputs with which to round it as it is."""
        whole = np.empty_like(weight)
        whole[self.order] = self.compensated(weight, slice(None))
        return whole, LayerInputs(self._quantized, self._quantized)

    def _tokens(self) -> Iterator[slice]:
        """All of them, some at a time, in order."""
        count = self._quantized.shape[0]
        return (slice(start, min(start + _ROWS_AT_ONCE, count)) for start in range(0, count, _ROWS_AT_ONCE))

    @cached_property
    def _drifted(self) -> bool:
        if self._exact is self._quantized:
            return False
        drift = sum(float(np.square(self._exact[tokens] - self._quantized[tokens]).sum()) for tokens in self._tokens())
        return drift > _MIN_DRIFT * float(self.importance.sum())

    @cached_property
    def _inverses(self) -> list[Floats]:
        return corner_inverses(self.factor)

    @cached_property
    def _drift(self) -> Floats:
        """`[in, in]`, X^T (E - X)."""
        size = self._quantized.shape[1]
        drift = np.zeros((size, size), np.float32)
        for tokens in self._tokens():
            rows = self._quantized[tokens]
            drift += product(rows.T, self._exact[tokens] - rows)
        return drift
