"""How far the keys and values of a head reach: what their transforms are chosen from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from edgekv.spec import DecoderSpec
from exporters.checkpoint.rotate import Floats

ANGLES = np.deg2rad(np.arange(0.0, 90.0, 2.0))
"""Angles by which pairs may be turned; a quarter turn exchanges the elements and changes no magnitude."""

HeadNumber = tuple[int, int]
"""Layer, and number of the key/value head."""


@dataclass(frozen=True, slots=True)
class HeadReach:
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
    def none(cls, spec: DecoderSpec, layer: int) -> HeadReach:
        """Nothing seen yet."""
        half = _pairs(spec, layer)
        return cls(np.zeros((half, len(ANGLES)), np.float32), np.zeros(spec.head_dim - 2 * half, np.float32), 0.0)

    def with_keys(self, keys: Floats) -> HeadReach:
        """Also of these keys, `[T, D]`."""
        half = len(self.pairs)
        first, second, rest = keys[:, :half], keys[:, half : 2 * half], keys[:, 2 * half :]
        pairs = self.pairs.copy()
        for at, angle in enumerate(ANGLES.astype(np.float32)):
            cos, sin = np.cos(angle), np.sin(angle)
            for turned in (cos * first - sin * second, sin * first + cos * second):
                np.maximum(pairs[:, at], np.abs(turned).max(axis=0), out=pairs[:, at])
        return replace(self, pairs=pairs, rest=np.maximum(self.rest, np.abs(rest).max(axis=0)))

    def with_values(self, largest: float) -> HeadReach:
        """Also of values of this magnitude."""
        return replace(self, value=max(self.value, float(largest)))


def _pairs(spec: DecoderSpec, layer: int) -> int:
    """Number of rotary pairs; without a rotary embedding, pairs may be turned all the same."""
    return (spec.rope_of(layer) or spec.rope).width // 2
