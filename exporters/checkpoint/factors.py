"""A matrix as a product of two, to which the transforms of a recipe apply without multiplying them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Factors:
    """`left @ right`.

    Attributes:
        left: `[out, r]`.
        right: `[r, in]`.
    """

    left: NDArray[np.float32]
    right: NDArray[np.float32]
