"""The observed values of a tensor: its extremes, and a sample to trade off clipping against rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quant.encoding import Dtype, Encoding

_SAMPLE = 4096  # of a call of `observe`
_MAX_SAMPLED = 1 << 17
_THINNED = 3
_CLIPS = np.linspace(1.0, 0.4, 31)


LARGEST = 1e9
"""Largest activation: far above any model's, and far below where squares overflow float32."""


class Range:
    """Collects the values of one tensor during calibration.

    Attributes:
        low: the least value, at most 0.
        high: the greatest, at least 0.
        is_seen: whether there was any value; no encoding follows from a range without one.
    """

    __slots__ = ("_samples", "_step", "high", "is_seen", "low")

    def __init__(
        self, low: float | None = None, high: float | None = None, sample: NDArray[np.float32] | None = None
    ) -> None:
        """With the extremes that were seen; None for none yet."""
        self.low = low or 0.0
        self.high = high or 0.0
        self.is_seen = low is not None or high is not None
        self._samples: list[NDArray[np.float32]] = [] if sample is None else [sample]
        self._step = 1

    def observe(self, values: NDArray[Any], *, keep_sample: bool = False) -> None:
        """Widen the extremes; with `keep_sample` also keep about 4,096 evenly spaced values, of a long text fewer.

        Raises:
            ValueError: a value is NaN, infinite, or larger than any activation of a model that works.
        """
        if not values.size:
            return
        low, high = float(values.min()), float(values.max())
        if not (low >= -LARGEST and high <= LARGEST):  # NaN too
            raise ValueError(f"values: got {low:.3g} to {high:.3g}; expected at most {LARGEST:.0e} in magnitude")
        self.low, self.high, self.is_seen = min(self.low, low), max(self.high, high), True
        if keep_sample:
            flat = np.asarray(values, np.float32).reshape(-1)
            # An odd step visits every element of a head, whose width is even.
            self._samples.append(flat[:: (flat.size // _SAMPLE | 1) * self._step].copy())
            if sum(sample.size for sample in self._samples) > _MAX_SAMPLED:
                self._samples = [self.sample[::_THINNED].copy()]
                self._step *= _THINNED

    def widen(self, other: Range, max_ratio: float) -> None:
        """Cover another range too, up to `max_ratio` times the greatest magnitude so far."""
        bound = max_ratio * self.absmax
        self.low, self.high = min(self.low, max(other.low, -bound)), max(self.high, min(other.high, bound))

    def cover(self, other: Range) -> None:
        """Cover all of another range too, and its sample."""
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.is_seen |= other.is_seen
        self._samples += other._samples

    @property
    def sample(self) -> NDArray[np.float32]:
        """The kept values; may be empty."""
        return np.concatenate(self._samples) if self._samples else np.empty(0, np.float32)

    @property
    def absmax(self) -> float:
        """The greatest magnitude."""
        return max(-self.low, self.high)

    def symmetric(self, dtype: Dtype, *, of_roots: bool = False) -> Encoding:
        """The symmetric encoding of least mean squared error on the sample; without a sample it does not clip.

        Args:
            dtype: integer type.
            of_roots: whether values are signed square roots, so that the errors of their squares count.
        """
        if not self._samples:
            return Encoding.symmetric(self.absmax, dtype)
        sample = self.sample
        meant = sample * np.abs(sample) if of_roots else sample
        candidates = [Encoding.symmetric(self.absmax * float(clip), dtype) for clip in _CLIPS]
        errors = []
        for encoding in candidates:
            restored = encoding.dequantize(encoding.quantize(sample))
            errors.append(float(np.square((restored * np.abs(restored) if of_roots else restored) - meant).mean()))
        return candidates[int(np.argmin(errors))]
