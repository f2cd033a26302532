"""Affine encodings of real numbers as integers: real = scale * (integer - zero_point)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Dtype = Literal["u8", "s8", "u16", "s16"]

DTYPES: dict[Dtype, np.dtype[Any]] = {
    "u8": np.dtype(np.uint8),
    "s8": np.dtype(np.int8),
    "u16": np.dtype(np.uint16),
    "s16": np.dtype(np.int16),
}


@dataclass(frozen=True, slots=True)
class Encoding:
    """The encoding of a whole tensor.

    Attributes:
        dtype: the integer type.
        scale: the step between two neighbouring integers, above 0.
        zero_point: the integer that means 0.0, within the type's limits.
    """

    dtype: Dtype
    scale: float
    zero_point: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: got {self.dtype!r}; expected one of {', '.join(DTYPES)}")
        if not 0 < self.scale <= _LARGEST:
            raise ValueError(f"scale: got {self.scale}; expected a finite number above 0, within float32")
        low, high = self.limits
        if not low <= self.zero_point <= high:
            raise ValueError(f"zero_point: got {self.zero_point}; expected {low} to {high}")

    @classmethod
    def asymmetric(cls, low: float, high: float, dtype: Dtype) -> Encoding:
        """The encoding with the smallest step that covers `low` to `high` and represents 0.0 exactly."""
        min_integer, max_integer = _limits(dtype)
        low, high = min(low, 0.0), max(high, 0.0)
        scale = _as_float32(max((high - low) / (max_integer - min_integer), _SMALLEST))
        return cls(dtype, scale, int(np.clip(round(min_integer - low / scale), min_integer, max_integer)))

    @classmethod
    def symmetric(cls, absmax: float, dtype: Dtype) -> Encoding:
        """A symmetric range around 0.0; the zero point is the middle of the type (128 for u8)."""
        min_integer, max_integer = _limits(dtype)
        middle = (min_integer + max_integer + 1) // 2
        return cls(dtype, _as_float32(max(absmax / (max_integer - middle), _SMALLEST)), middle)

    def times(self, factor: float) -> Encoding:
        """The encoding in which the same integers mean numbers `factor` times as large."""
        return Encoding(self.dtype, _as_float32(self.scale * factor), self.zero_point)

    @property
    def limits(self) -> tuple[int, int]:
        """The minimum and maximum integer."""
        return _limits(self.dtype)

    @property
    def reach(self) -> tuple[float, float]:
        """The minimum and maximum real number."""
        low, high = self.limits
        return (low - self.zero_point) * self.scale, (high - self.zero_point) * self.scale

    def quantize(self, real: NDArray[Any]) -> NDArray[Any]:
        """Integers of the same shape: round half to even, then saturate (ONNX QuantizeLinear)."""
        steps = np.rint(np.asarray(real, np.float32) / np.float32(self.scale)) + self.zero_point
        integers: NDArray[Any] = np.clip(steps, *self.limits).astype(DTYPES[self.dtype])
        return integers

    def dequantize(self, integers: NDArray[Any]) -> NDArray[np.float32]:
        """float32 of the same shape (ONNX DequantizeLinear)."""
        return (integers.astype(np.int32) - self.zero_point).astype(np.float32) * np.float32(self.scale)


_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)


@cache
def _limits(dtype: Dtype) -> tuple[int, int]:
    info = np.iinfo(DTYPES[dtype])
    return int(info.min), int(info.max)


def _as_float32(scale: float) -> float:
    """Graphs store scales as float32, so encodings round to it."""
    return float(np.float32(scale))
