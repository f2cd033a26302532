"""What rounding does to one tensor, summed up over a text."""

from __future__ import annotations

import numpy as np

from exporters.inspect.divergence import PERFECT_DB
from exporters.quantize.reference import Floats
from quant import Encoding

_TINY = 1e-30


class Power:
    """Powers of a signal and of what was added to it."""

    __slots__ = ("noise", "signal")

    def __init__(self) -> None:
        self.signal = 0.0
        self.noise = 0.0

    def add(self, signal: Floats, difference: Floats) -> None:
        """Values of one shape."""
        self.signal += float(np.square(signal, dtype=np.float64).sum())
        self.noise += float(np.square(difference, dtype=np.float64).sum())

    @property
    def sqnr_db(self) -> float:
        """Their ratio in dB, at most `PERFECT_DB` and at least its negative."""
        signal = max(self.signal, _TINY)
        if not np.isfinite(self.noise):
            return -PERFECT_DB
        return float(np.clip(10 * np.log10(signal / max(self.noise, _TINY)), -PERFECT_DB, PERFECT_DB))


class ResultMeter:
    """A result beside the reference's, and what its own encoding would do to the reference's.

    Attributes:
        encoding: of its integers.
        whole: the difference of bundle and reference.
        own: the difference that rounding the exact values into `encoding` makes.
        clipped: of `own`, the part of values beyond the encoding's reach.
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
        """The channel of the greatest value, and how many times the typical channel's greatest value that is."""
        if self._peaks is None or len(self._peaks) < 2:
            return None
        typical = max(float(np.median(self._peaks)), _TINY)
        return int(self._peaks.argmax()), float(self._peaks.max()) / typical


class MatrixMeter:
    """A matrix of the bundle beside the checkpoint's.

    Attributes:
        weights: the matrix, and how far the bundle's is from it.
        output: what it gives for exact inputs, and how far the bundle's is from that.
    """

    __slots__ = ("_difference", "_inputs", "output", "weights")

    def __init__(self, exact: Floats, stored: Floats) -> None:
        """Matrices `[out, in]`; `stored` is overwritten."""
        self.weights, self.output = Power(), Power()
        self._difference = np.subtract(stored, exact, out=stored)
        self.weights.add(exact, self._difference)
        self._inputs = np.zeros(exact.shape[1])

    def add(self, x: Floats, product: Floats, rows: slice) -> None:
        """Inputs `[T, in]`, and what the exact matrix's `rows` make of them."""
        self.output.add(product, x @ self._difference[rows].T)
        if not rows.start:
            self._inputs += np.square(x, dtype=np.float64).sum(axis=0)

    def close(self) -> None:
        """No more inputs come: forget the matrix."""
        self._inputs *= np.square(self._difference, dtype=np.float64).sum(axis=0)
        self._difference = self._difference[:0]

    @property
    def outlier(self) -> tuple[int, float]:
        """After `close`: the input that costs the output most, and its share of what all cost."""
        total = max(float(self._inputs.sum()), _TINY)
        return int(self._inputs.argmax()), float(self._inputs.max()) / total
