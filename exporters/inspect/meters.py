"""Accumulated quantization error of one tensor over a text."""

from __future__ import annotations

import numpy as np

from edgekv.spec.tensors import by_inputs
from exporters.inspect.divergence import PERFECT_DB
from exporters.quantize.reference import Floats
from quant import Encoding

_TINY = 1e-30


class Power:
    """Accumulated power of a signal and of its error."""

    __slots__ = ("noise", "signal")

    def __init__(self) -> None:
        self.signal = 0.0
        self.noise = 0.0

    def add(self, signal: Floats, difference: Floats) -> None:
        """Add a signal and its error, of the same shape."""
        self.signal += float(np.square(signal, dtype=np.float64).sum())
        self.noise += float(np.square(difference, dtype=np.float64).sum())

    @property
    def sqnr_db(self) -> float:
        """SQNR in dB, clipped to +-`PERFECT_DB`."""
        signal = max(self.signal, _TINY)
        if not np.isfinite(self.noise):
            return -PERFECT_DB
        return float(np.clip(10 * np.log10(signal / max(self.noise, _TINY)), -PERFECT_DB, PERFECT_DB))


class ResultMeter:
    """The error of one result, and the part that its own encoding causes.

    Attributes:
        encoding: the result's encoding.
        whole: error of the bundle's values.
        own: error of the exact values rounded in `encoding`.
        clipped: the part of `own` from values outside the encoding's range.
    """

    __slots__ = ("_peaks", "clipped", "encoding", "own", "whole")

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding
        self.whole, self.own, self.clipped = Power(), Power(), Power()
        self._peaks: Floats | None = None

    def add(self, exact: Floats, found: Floats) -> None:
        """Values `[T, width]` of one window."""
        self.whole.add(exact, found - exact)
        rounded = self.encoding.dequantize(self.encoding.quantize(exact)) - exact
        self.own.add(exact, rounded)
        low, high = self.encoding.reach
        beyond = (exact < low) | (exact > high)
        self.clipped.add(exact[beyond], rounded[beyond])
        peaks = np.abs(exact).max(axis=0)
        self._peaks = peaks if self._peaks is None else np.maximum(self._peaks, peaks)

    @property
    def outlier(self) -> tuple[int, float] | None:
        """The channel with the largest peak, and that peak over the median channel's."""
        if self._peaks is None or len(self._peaks) < 2:
            return None
        typical = max(float(np.median(self._peaks)), _TINY)
        return int(self._peaks.argmax()), float(self._peaks.max()) / typical


class MatrixMeter:
    """The error of one matrix.

    Attributes:
        weights: error of the matrix's elements.
        output: error of its output on exact inputs.
    """

    __slots__ = ("_difference", "_inputs", "output", "weights")

    def __init__(self, exact: Floats, stored: Floats) -> None:
        """Matrices `[out, in]`; `stored` is overwritten."""
        self.weights, self.output = Power(), Power()
        self._difference = np.subtract(stored, exact, out=stored)
        self.weights.add(exact, self._difference)
        self._inputs = np.zeros(exact.shape[1])

    def add(self, x: Floats, product: Floats, rows: slice) -> None:
        """Add inputs `[T, in]` and their exact product with `rows` of the matrix."""
        self.output.add(product, x @ by_inputs(self._difference[rows]))
        if not rows.start:
            self._inputs += np.square(x, dtype=np.float64).sum(axis=0)

    def close(self) -> None:
        """Drop the matrix; no inputs follow."""
        self._inputs *= np.square(self._difference, dtype=np.float64).sum(axis=0)
        self._difference = self._difference[:0]

    @property
    def outlier(self) -> tuple[int, float]:
        """After `close`: the input that causes most of the output error, and its share."""
        total = max(float(self._inputs.sum()), _TINY)
        return int(self._inputs.argmax()), float(self._inputs.max()) / total
