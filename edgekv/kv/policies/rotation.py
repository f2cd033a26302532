"""Rotates quantized keys to other positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekv.kv.arena import Rows


class KvEncoding(Protocol):
    """The real value of an integer of a cache tensor: scale * (integer - zero_point)."""

    @property
    def scale(self) -> float:
        """The step between two neighbouring integers."""

    @property
    def zero_point(self) -> int:
        """The integer that represents 0.0."""


@dataclass(frozen=True, slots=True)
class Requantization:
    """Rounding error of all keys that were rotated.

    Attributes:
        keys: vectors of D elements that were rotated and rounded, of all tensors.
        rms_steps: root of the mean squared difference of an element from its exact rotation, in steps of the
            encoding; 0.289 would be rounding alone.
        max_steps: maximum difference, in steps.
        rms: root of the mean squared difference in real numbers, or None if the encodings are not known.
        clipped: number of elements beyond the limits of the integer type.
    """

    keys: int
    rms_steps: float
    max_steps: float
    rms: float | None
    clipped: int


class Rotation:
    """Rotates keys in the half-split form of Llama, pairs (i, i + R/2), and sums the rounding error."""

    def __init__(self, inverse_frequencies: Sequence[float]) -> None:
        """The angle of pair i for one position is `inverse_frequencies[i]`; R/2 of them, of at most D/2."""
        self._frequencies = np.asarray(inverse_frequencies, np.float64)
        self._keys = 0
        self._elements = 0
        self._clipped = 0
        self._squares = 0.0
        self._real_squares: float | None = 0.0
        self._greatest = 0.0

    def angles(self, moved: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Cosines and sines `[tokens, R/2]` for tokens that move by `moved` positions."""
        angles = np.asarray(moved, np.float64)[:, None] * self._frequencies
        return np.cos(angles), np.sin(angles)

    def turn(self, keys: Rows, zero_point: int, scale: float | None, angles: tuple[NDArray[Any], NDArray[Any]]) -> Rows:
        """Keys `[tokens, D]` of one tensor at their new positions, rounded half to even and saturated.

        The rotation is linear and a tensor has one scale, so the integers less the zero point are rotated as they are.
        Elements from R on stay as they are.
        """
        cos, sin = angles
        turning, still = np.split(keys, [2 * cos.shape[1]], axis=1)
        first, second = np.split(turning.astype(np.float64) - zero_point, 2, axis=1)
        exact = np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=1) + zero_point
        limits = np.iinfo(keys.dtype)
        turned = np.rint(exact).clip(limits.min, limits.max)
        self._observe(exact - turned, scale, int(np.count_nonzero(turned != np.rint(exact))))
        integers: Rows = np.concatenate((turned.astype(keys.dtype), still), axis=1)
        return integers

    def _observe(self, errors: NDArray[np.float64], scale: float | None, clipped: int) -> None:
        squares = float(np.square(errors).sum())
        self._keys += len(errors)
        self._elements += errors.size
        self._clipped += clipped
        self._squares += squares
        self._greatest = max(self._greatest, float(np.abs(errors).max(initial=0.0)))
        if scale is None or self._real_squares is None:
            self._real_squares = None
        else:
            self._real_squares += squares * scale * scale

    @property
    def cost(self) -> Requantization:
        """The error of all keys so far."""
        elements = max(1, self._elements)
        return Requantization(
            keys=self._keys,
            rms_steps=float(np.sqrt(self._squares / elements)),
            max_steps=self._greatest,
            rms=None if self._real_squares is None else float(np.sqrt(self._real_squares / elements)),
            clipped=self._clipped,
        )
