"""Weights of no checkpoint, for graphs of which only the schedule is wanted: values change none."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np

from edgekv.bundle import MatrixPlace, TensorPlace, WeightPlaces
from edgekv.spec import EMBEDDING, DecoderSpec, head_width, views
from edgekv.spec.tensors import DELTA_RATES, part_name
from exporters.quantize.recipe import Recipe
from exporters.quantize.weights import MatrixNames, PlacedWeights
from quant import WEIGHT_TYPES, Encoding

FILE = "random.weights"

_SCALE = 0.01
_BLOCK_SCALES = 15
_NORM = Encoding("u16", 1 / 32768, 0)
_SHIFT = 4096
_SHIFTS = 256
"""Matrices begin at different places, so that no two are equal."""


class RandomWeights(PlacedWeights):
    """The weights of a decoder in the types of a recipe; all are places in one file, which `write` writes."""

    def __init__(self, spec: DecoderSpec, recipe: Recipe) -> None:
        super().__init__(WeightPlaces())
        self._spec = spec
        self._recipe = recipe
        read = (view for view in views(spec) if view.name != EMBEDDING and (view.is_multiplied or len(view.shape) != 2))
        self._shapes = {view.name: view.shape for view in read}
        self._used: list[str] = []

    def matrix(self, key: str, *, head: int | None, gain: float) -> MatrixNames:
        if key not in self._places.matrices:
            outputs, inputs = self._shapes[key]
            dtype = self._recipe.rule(key).dtype
            self._places.matrices[key] = MatrixPlace(
                file=FILE,
                dtype=dtype,
                rows=inputs,
                columns=outputs,
                heads=1 if head is None else outputs // head_width(self._spec, key),
                integers=self._start(key),
                scales=self._scales,
                block_scales=None if WEIGHT_TYPES[dtype].block is None else self._block_scales,
            )
        return super().matrix(key, head=head, gain=gain)

    def tensor(self, key: str, *, head: int | None = None, tap: int | None = None) -> tuple[str, Encoding]:
        name = part_name(key, head, tap)
        if name not in self._places.tensors:
            shape = self._shapes[key]
            if tap is not None:
                shape = shape[:1]
            elif head is not None:
                shape = (1 if key.endswith(DELTA_RATES) else head_width(self._spec, key),)
            self._places.tensors[name] = TensorPlace(file=FILE, shape=shape, offset=self._start(name), encoding=_NORM)
        return super().tensor(key, head=head, tap=tap)

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
