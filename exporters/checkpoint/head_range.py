"""How far the keys and values of a head reach: what their transforms are chosen from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from edgekv.spec import DecoderSpec
from exporters.checkpoint.fold import Floats

ANGLES = np.deg2rad(np.arange(0.0, 90.0, 2.0))
"""Angles by which pairs may be turned; a quarter turn exchanges the elements and changes no magnitude."""

_SAME = 1 - 1e-5  # more than the rounding of a turn
_TURNED_AT_ONCE = 1 << 18  # elements; all angles together take a twentieth of the calls, and memory for each

HeadNumber = tuple[int, int]
"""Layer, and number of the key/value head."""


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Greatest magnitudes of a head's keys and values.

    Attributes:
        pairs: of each rotary pair of keys after a turn by each of `ANGLES`, `[R/2, angles]`.
        rest: of the elements of keys that are not rotated, `[D - R]`.
        value: of the values after a Hadamard rotation.
    """

    pairs: Floats
    rest: Floats
    value: float

    @classmethod
    def none(cls, spec: DecoderSpec, layer: int) -> HeadRange:
        """Nothing seen yet."""
        half = _pairs(spec, layer)
        return cls(
            np.zeros((half, len(ANGLES)), np.float32),
            np.zeros(spec.of_layer(layer).head_dim - 2 * half, np.float32),
            0.0,
        )

    def covering(self, other: HeadRange) -> HeadRange:
        """Also of the keys and values of another one."""
        pairs, rest = np.maximum(self.pairs, other.pairs), np.maximum(self.rest, other.rest)
        return HeadRange(pairs, rest, max(self.value, other.value))

    def with_keys(self, keys: Floats) -> HeadRange:
        """Also of these keys, `[T, D]`."""
        half = len(self.pairs)
        rest = np.maximum(self.rest, np.abs(keys[:, 2 * half :]).max(axis=0))
        first, second = keys[:, :half].T, keys[:, half : 2 * half].T
        # No turn makes an element larger than the pair's radius, so most tokens cannot widen what others reached.
        wider = np.hypot(first, second) >= self.pairs.min(axis=1, keepdims=True) * _SAME
        numbers, starts = np.unique(np.nonzero(wider)[0], return_index=True)
        if not len(numbers):
            return replace(self, rest=rest)
        first, second, pairs = first[wider], second[wider], self.pairs.copy()
        together = max(1, _TURNED_AT_ONCE // len(first))
        for start in range(0, len(ANGLES), together):
            angles = ANGLES[start : start + together, None].astype(np.float32)
            cos, sin = np.cos(angles), np.sin(angles)
            turned = np.maximum(np.abs(cos * first - sin * second), np.abs(sin * first + cos * second))
            reached = np.maximum.reduceat(turned, starts, axis=1).T
            at = numbers, slice(start, start + together)
            pairs[at] = np.maximum(pairs[at], reached)
        return replace(self, pairs=pairs, rest=rest)

    def with_values(self, largest: float) -> HeadRange:
        """Also of values of this magnitude."""
        return replace(self, value=max(self.value, float(largest)))


def _pairs(spec: DecoderSpec, layer: int) -> int:
    """Number of rotary pairs; without a rotary embedding, pairs may be turned all the same."""
    return (spec.rope_of(layer) or spec.rope).width // 2
