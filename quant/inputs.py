"""The inputs of matrices on calibration text, and the values that GPTQ derives from them."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from quant.cholesky import cholesky, corner_inverses, solve
from quant.products import product

Floats = NDArray[np.float32]

_DAMPING = 0.1  # of the mean of the diagonal; a short calibration text needs more than the usual 0.01
_DRIFTING_DAMPING = 0.3  # with inputs that drifted, as 4 bits leave them: larger errors fit a short text more
_LEAST_DRIFT = 3e-3  # of the inputs' energy; below it, what predicts the error on one text does not on others

_ROWS_AT_ONCE = 1024


class LayerInputs:
    """Inputs of a matrix, or of several that share them, on all calibration tokens.

    Derived values are computed once, on first use.

    Args:
        exact: `[tokens, in]`, E, of the exact model.
        quantized: `[tokens, in]`, X, of the quantized model.
        missing: `[tokens, out]`, M, what the sums that the outputs are added to have too little; None for nothing.
    """

    def __init__(self, exact: Floats, quantized: Floats, missing: Floats | None = None) -> None:
        self._exact = exact
        self._quantized = quantized
        self._missing = missing

    @cached_property
    def importance(self) -> Floats:
        """`[in]`, the sum of squares of each input: the diagonal of H = X^T X."""
        found: Floats = np.einsum("ti,ti->i", self._quantized, self._quantized)
        return found

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
        ordered = self._quantized[:, self.order]
        hessian = ordered.T @ ordered
        del ordered
        hessian[np.diag_indices(len(hessian))] += self.damping
        return cholesky(hessian)

    @cached_property
    def hessian(self) -> Floats:
        """`[in, in]`, H + damping, rows and columns in `order`."""
        return product(self.factor, self.factor.T)

    def compensated(self, weight: Floats, columns: slice) -> Floats:
        """Columns of W + (H + damping)^-1 X^T ((E - X) W + M), rows in `order`.

        On X, the outputs of these columns are closest to the outputs of W on E, and M: as in GPTAQ (arXiv 2504.02692),
        which has no M. If X hardly differs from E, as in models of 8 bits, W stays: on SmolLM2-135M the correction
        would cost other text a third more.

        Args:
            weight: `[in, out]`, W.
            columns: of `weight`.
        """
        tokens, (inputs, outputs) = len(self._exact), weight.shape
        chosen = weight[:, columns]
        if not self._drifted:
            unchanged: Floats = chosen[self.order]
            return unchanged
        if 2 * tokens * outputs < tokens * inputs + inputs * outputs:  # fewer products than through [in, in]
            missing = product(self._quantized.T, product(self._difference, chosen))
        else:
            missing = product(self._drift, chosen)
        if self._missing is not None:
            missing += product(self._quantized.T, np.ascontiguousarray(self._missing[:, columns]))
        target = solve(self.factor, self._inverses, missing[self.order])
        target += chosen[self.order]
        return target

    def making_up(self, weight: Floats) -> tuple[Floats, LayerInputs]:
        """A matrix `[in, out]` that is `compensated` as a whole, and the inputs with which to round it as it is."""
        whole = np.empty_like(weight)
        whole[self.order] = self.compensated(weight, slice(None))
        return whole, LayerInputs(self._quantized, self._quantized)

    @cached_property
    def _drifted(self) -> bool:
        if self._exact is self._quantized:
            return False
        parts = (slice(start, start + _ROWS_AT_ONCE) for start in range(0, len(self._exact), _ROWS_AT_ONCE))
        drift = sum(float(np.square(self._exact[part] - self._quantized[part]).sum()) for part in parts)
        return drift > _LEAST_DRIFT * float(self.importance.sum())

    @cached_property
    def _inverses(self) -> list[Floats]:
        return corner_inverses(self.factor)

    @cached_property
    def _difference(self) -> Floats:
        return self._exact - self._quantized

    @cached_property
    def _drift(self) -> Floats:
        """`[in, in]`, X^T (E - X)."""
        return product(self._quantized.T, self._exact - self._quantized)
