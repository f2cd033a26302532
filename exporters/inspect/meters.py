"""Accumulated quantization error of one tensor over a text, weighed token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgekv.spec.tensors import by_inputs
from exporters.inspect.report import ValueRange
from exporters.quantize.reference import Floats
from quant import Encoding

PERFECT_TOKEN_DB = 100.0
"""Upper limit of a token's SQNR, just above what 16 bits reach: a token without error must not own the mean."""

_TINY = 1e-30
_CENTRAL = (0.001, 0.999)
_SAMPLE = 4096  # values a window


@dataclass(slots=True)
class TokenPower:
    """Power of the signal and of the error at each token of each window; the last window may still be added to."""

    signal: list[NDArray[np.float64]]
    noise: list[NDArray[np.float64]]

    @classmethod
    def empty(cls) -> TokenPower:
        """Nothing added yet."""
        return cls([], [])

    def add(self, signal: Floats, difference: Floats, *, more: bool = False) -> None:
        """Add a signal and its error `[T, width]` of a new window; with `more`, further columns of the last one."""
        powers = (np.einsum("tw,tw->t", values, values, dtype=np.float64) for values in (signal, difference))
        for held, power in zip((self.signal, self.noise), powers, strict=True):
            if more:
                held[-1] += power
            else:
                held.append(power)

    def sqnr_db(self, apart: int) -> tuple[float, float | None]:
        """Mean SQNR in dB of all tokens but the first `apart` of each window, and of those, if there are any.

        Tokens without a signal do not count.
        """
        signal = [np.split(powers, [apart]) for powers in self.signal]
        noise = [np.split(powers, [apart]) for powers in self.noise]
        first, rest = (
            _mean_db(*(np.concatenate([parts[index] for parts in windows]) for windows in (signal, noise)))
            for index in (0, 1)
        )
        return PERFECT_TOKEN_DB if rest is None else rest, first

    def relative_noise(self, apart: int) -> float:
        """Noise over signal, summed over all tokens with a signal but the first `apart` of each window."""
        signal = np.concatenate([powers[apart:] for powers in self.signal])
        noise = np.concatenate([powers[apart:] for powers in self.noise])
        return float((noise[signal > 0] / signal[signal > 0]).sum())


def excluded_first_tokens(first: int) -> int:
    """How many tokens at the start of windows that begin at position `first` are weighed apart: position 0."""
    return 1 if first == 0 else 0


def _mean_db(signal: NDArray[np.float64], noise: NDArray[np.float64]) -> float | None:
    counted = signal > 0
    if not counted.any():
        return None
    noise = np.where(np.isfinite(noise), noise, np.inf)[counted]
    with np.errstate(divide="ignore"):
        levels = 10 * np.log10(signal[counted] / np.maximum(noise, _TINY))
    return float(np.clip(levels, -PERFECT_TOKEN_DB, PERFECT_TOKEN_DB).mean())


@dataclass(frozen=True, slots=True)
class Peak:
    """The token at which a result has its greatest magnitude.

    Attributes:
        position: its position in the window.
        token: its id.
        magnitude: the greatest there.
        others: the greatest at all other tokens, which are those at other positions for position 0, and those with
            another id for any other position.
        low: the least value at the other tokens.
        high: the greatest value at the other tokens.
    """

    position: int
    token: int
    magnitude: float
    others: float
    low: float
    high: float


class ResultMeter:
    """The error of one result, the part that its own encoding causes, and the values that it saw.

    Attributes:
        encoding: the result's encoding.
    """

    __slots__ = ("_apart", "_clipped", "_first", "_highs", "_lows", "_meaning", "_own", "_peaks", "_samples",
                 "_tokens", "_whole", "encoding")  # fmt: skip

    def __init__(self, encoding: Encoding, first: int = 0, *, holds_roots: bool = False) -> None:
        """Start empty.

        Args:
            encoding: of the result.
            first: the position of the first token of each window.
            holds_roots: whether values are signed square roots, so that the errors of their squares count.
        """
        self.encoding = encoding
        self._meaning: Callable[[Floats], Floats] = _signed_squares if holds_roots else _as_they_are
        self._first = first
        self._apart = excluded_first_tokens(first)
        self._whole, self._own, self._clipped = (TokenPower.empty() for _ in range(3))
        self._peaks: Floats | None = None
        self._lows: list[Floats] = []
        self._highs: list[Floats] = []
        self._tokens: list[NDArray[np.int64]] = []
        self._samples: list[Floats] = []

    def add(self, tokens: NDArray[np.int64], exact: Floats, actual: Floats) -> None:
        """Values `[T, width]` at the tokens `[T]` of one window."""
        meaning = self._meaning
        meant = meaning(exact)
        self._whole.add(meant, meaning(actual) - meant)
        rounded = meaning(self.encoding.dequantize(self.encoding.quantize(exact))) - meant
        self._own.add(meant, rounded)
        low, high = self.encoding.reach
        self._clipped.add(meant, np.where((exact < low) | (exact > high), rounded, np.float32(0)))
        self._tokens.append(tokens)
        self._lows.append(exact.min(axis=1))
        self._highs.append(exact.max(axis=1))
        if len(rest := exact[self._apart :]):
            self._samples.append(rest.reshape(-1)[:: max(1, rest.size // _SAMPLE)])
            peaks = np.abs(rest).max(axis=0)
            self._peaks = peaks if self._peaks is None else np.maximum(self._peaks, peaks)

    @property
    def sqnr_db(self) -> tuple[float, float | None]:
        """SQNR of the bundle's values, at all positions but 0 and there."""
        return self._whole.sqnr_db(self._apart)

    @property
    def own_db(self) -> float:
        """SQNR of the exact values rounded in `encoding`, at all positions but 0."""
        return self._own.sqnr_db(self._apart)[0]

    @property
    def clipped(self) -> float:
        """The share of the own error caused by values outside of the encoding's range."""
        return self._clipped.relative_noise(self._apart) / max(self._own.relative_noise(self._apart), _TINY)

    @property
    def range(self) -> ValueRange:
        """The encoding's range against the exact values."""
        low, high = self.encoding.reach
        samples = np.concatenate(self._samples) if self._samples else np.zeros(1, np.float32)
        least, most = (float(edge) for edge in np.quantile(samples, _CENTRAL))
        return ValueRange(
            reach=(low, high),
            seen=(float(np.concatenate(self._lows).min()), float(np.concatenate(self._highs).max())),
            central=(least, most),
            unused_bits=float(np.log2((high - low) / max(most - least, _TINY))),
        )

    @property
    def outlier(self) -> tuple[int, float] | None:
        """The channel with the largest peak at positions but 0, and that peak over the median channel's."""
        if self._peaks is None or len(self._peaks) < 2:
            return None
        typical = max(float(np.median(self._peaks)), _TINY)
        return int(self._peaks.argmax()), float(self._peaks.max()) / typical

    @property
    def peak(self) -> Peak | None:
        """The token with the greatest magnitude; None if there are no others."""
        lows, highs, tokens = (np.concatenate(windows) for windows in (self._lows, self._highs, self._tokens))
        positions = np.concatenate([np.arange(len(window)) + self._first for window in self._tokens])
        magnitudes = np.maximum(np.abs(lows), np.abs(highs))
        at = int(magnitudes.argmax())
        same = positions == 0 if positions[at] == 0 else tokens == tokens[at]
        if same.all():
            return None
        return Peak(
            position=int(positions[at]),
            token=int(tokens[at]),
            magnitude=float(magnitudes[at]),
            others=float(magnitudes[~same].max()),
            low=float(lows[~same].min()),
            high=float(highs[~same].max()),
        )


class MatrixMeter:
    """The error of one matrix.

    Attributes:
        weights_db: SQNR of the matrix's elements.
    """

    __slots__ = ("_apart", "_difference", "_inputs", "_output", "weights_db")

    def __init__(self, exact: Floats, stored: Floats, apart: int = 0) -> None:
        """Matrices `[out, in]`; `stored` is overwritten. `apart` first tokens of each window are weighed apart."""
        self._output = TokenPower.empty()
        self._apart = apart
        self._difference = np.subtract(stored, exact, out=stored)
        signal, noise = (float(np.square(matrix, dtype=np.float64).sum()) for matrix in (exact, self._difference))
        self.weights_db = _mean_db(np.array([signal]), np.array([noise])) or 0.0
        self._inputs = np.zeros(exact.shape[1])

    def add(self, x: Floats, product: Floats, rows: slice) -> None:
        """Add inputs `[T, in]` and their exact product with `rows` of the matrix; the first rows come first."""
        self._output.add(product, x @ by_inputs(self._difference[rows]), more=bool(rows.start))
        if not rows.start:
            self._inputs += np.square(x[self._apart :], dtype=np.float64).sum(axis=0)

    def close(self) -> None:
        """Drop the matrix; no inputs follow."""
        self._inputs *= np.square(self._difference, dtype=np.float64).sum(axis=0)
        self._difference = self._difference[:0]

    @property
    def output_db(self) -> float:
        """SQNR of the matrix's output on exact inputs."""
        return self._output.sqnr_db(self._apart)[0]

    @property
    def outlier(self) -> tuple[int, float]:
        """After `close`: the input that causes most of the output error, and its share."""
        total = max(float(self._inputs.sum()), _TINY)
        return int(self._inputs.argmax()), float(self._inputs.max()) / total


def _signed_squares(values: Floats) -> Floats:
    squares: Floats = values * np.abs(values)
    return squares


def _as_they_are(values: Floats) -> Floats:
    return values
