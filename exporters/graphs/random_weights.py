"""Weights of no checkpoint, for graphs of which only the schedule is wanted: values change none."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from edgekv.bundle import TensorPlace
from edgekv.spec import DecoderSpec
from exporters.graphs.weights import AskedWeights, Place
from exporters.quantize.recipe import Recipe

FILE = "random.weights"

_SCALE = 0.01
_BLOCK_SCALES = 15
_SHIFT = 4096
_SHIFTS = 256
"""Matrices begin at different places, so that no two are equal."""


class RandomWeights(AskedWeights):
    """The weights of a decoder in the types of a recipe; all are places in one file, which `write` writes."""

    def __init__(self, spec: DecoderSpec, recipe: Recipe) -> None:
        super().__init__(spec, recipe)
        self._used: list[str] = []

    def _placed(self, name: str, place: Place) -> Place:
        if isinstance(place, TensorPlace):
            return msgspec.structs.replace(place, file=FILE, offset=self._start(name))
        blocks = None if place.block_scales is None else self._block_scales
        return msgspec.structs.replace(
            place, file=FILE, integers=self._start(name), scales=self._scales, block_scales=blocks
        )

    def write(self, folder: Path) -> None:
        """Write the file that initializers point into."""
        noise = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8).tobytes()
        with (folder / FILE).open("wb") as file:
            for _ in range(-(-self._scales // len(noise))):
                file.write(noise)
            file.truncate(self._scales)
            file.seek(self._scales)
            file.write(np.full(self._widest, _SCALE, np.float32).tobytes())
            file.write(np.full(self._largest, _BLOCK_SCALES, np.uint8).tobytes())

    def _start(self, name: str) -> int:
        if name not in self._used:
            self._used.append(name)
        return self._used.index(name) % _SHIFTS * _SHIFT

    @cached_property
    def _largest(self) -> int:
        """Bytes of the largest tensor in 16 bits, or matrix in 8."""
        return max(int(np.prod(shape)) * (2 if len(shape) == 1 else 1) for shape in self._shapes.values())

    @cached_property
    def _widest(self) -> int:
        return max(max(shape) for shape in self._shapes.values())

    @property
    def _scales(self) -> int:
        """Where the scales begin."""
        return -(-(self._largest + _SHIFTS * _SHIFT) // _SHIFT) * _SHIFT

    @property
    def _block_scales(self) -> int:
        return self._scales + 4 * self._widest
