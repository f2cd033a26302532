"""A tensor and what adapters add to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from exporters.checkpoint.stored import CheckpointTensor, ComputedTensor, StoredTensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """The product of two matrices, `left @ right * scaling`.

    Attributes:
        left: `[out, r]`, or `[r, out]` of an embedding.
        right: `[r, in]`, or `[in, r]` of an embedding.
        scaling: multiplies the product.
        transposed: whether both are stored transposed, as those of an embedding are.
    """

    left: StoredTensor
    right: StoredTensor
    scaling: float
    transposed: bool

    def read(self, rows: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        """Some rows of the product."""
        left, right = self.left.open(), self.right.open().astype(np.float32)
        part = (left.T if self.transposed else left)[rows].astype(np.float32)
        product: NDArray[np.float32] = part @ (right.T if self.transposed else right)
        product *= np.float32(self.scaling)
        return product


@dataclass(frozen=True, slots=True)
class MergedTensor(ComputedTensor):
    """A matrix with adapters merged into it, in float32.

    Attributes:
        file: where the matrix itself is stored.
        shape: `[out, in]`.
        base: the matrix.
        added: what is added, in order.
    """

    file: Path
    shape: tuple[int, ...]
    base: CheckpointTensor
    added: tuple[LowRank, ...]

    def read(self, rows: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        values = self.base.read(rows)
        for product in self.added:
            values += product.read(rows)
        return values
