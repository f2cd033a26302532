"""Integer weights: one symmetric scale for each output channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix as integers, zero point 0.

    Attributes:
        integers: int8 `[in, out]`.
        scales: float32 `[out]`, one for each output channel (ONNX axis 1).
    """

    integers: NDArray[np.int8]
    scales: NDArray[np.float32]

    def columns(self, start: int, stop: int) -> QuantizedWeight:
        """The output channels from `start` up to `stop`: the same integers, so a head is a slice of the whole."""
        return QuantizedWeight(
            np.ascontiguousarray(self.integers[:, start:stop]), np.ascontiguousarray(self.scales[start:stop])
        )

    def dequantize(self) -> NDArray[np.float32]:
        """float32 `[in, out]`."""
        return self.integers.astype(np.float32) * self.scales


def quantize_per_channel(weight: NDArray[Any]) -> QuantizedWeight:
    """int8, symmetric, the channel's greatest magnitude at 127.

    Args:
        weight: float `[in, out]`.
    """
    weight = np.asarray(weight, np.float32)
    if weight.ndim != 2:
        raise ValueError(f"weight: found shape {weight.shape}; wanted two dimensions, [in, out]")
    absmax = np.abs(weight).max(axis=0)
    scales = np.maximum(absmax / np.float32(127), np.finfo(np.float32).tiny).astype(np.float32)
    integers = np.clip(np.rint(weight / scales), -127, 127).astype(np.int8)
    return QuantizedWeight(integers, scales)
