"""The dequantized matrices of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from edgekv.bundle import Bundle
from edgekv.spec.tensors import by_outputs
from exporters.quantize.reference import Floats
from quant import WEIGHT_TYPES, Grid, QuantizedWeight, WeightDtype, unpack_int4


class StoredMatrices:
    """Reads the files of `exporters.quantize.weights.WeightStore`, one matrix at a time."""

    def __init__(self, bundle: Bundle) -> None:
        """Locate the bundle's weights.

        Raises:
            BundleError: the bundle has no ONNX graphs.
        """
        bundle.require_onnx("the report on layers")
        self._dtypes: dict[str, WeightDtype] = {each.tensor: each.dtype for each in bundle.manifest.recipe.weights}
        self._files: dict[str, Path] = {}
        for path in sorted(bundle.path.glob("weights-*.safetensors")):
            with safe_open(path, framework="numpy") as file:
                self._files |= dict.fromkeys(file.keys(), path)

    def matrix(self, key: str) -> Floats:
        """float32 `[out, in]`, including the gains that the export folded into it."""
        parts = [by_outputs(self._read(key, part).dequantize()) for part in self._parts(key)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def bytes(self, key: str) -> int:
        """Size of a matrix: its integers and scales."""
        names = [name for part in self._parts(key) for name in self._names(key, part)]
        return sum(self._tensor(name).nbytes for name in names)

    @property
    def total_bytes(self) -> int:
        """Size of all weights, without file headers."""
        return sum(_content_bytes(path) for path in set(self._files.values()))

    def _parts(self, key: str) -> list[str]:
        """The stored name of the whole matrix, or those of its heads."""
        ending = f".{WEIGHT_TYPES[self._dtypes[key]].stored}"
        if key + ending in self._files:
            return [key]
        heads = sum(name.startswith(key + ".h") and name.endswith(ending) for name in self._files)
        return [f"{key}.h{head}" for head in range(heads)]

    def _names(self, key: str, part: str) -> list[str]:
        names = [f"{part}.{WEIGHT_TYPES[self._dtypes[key]].stored}", part + ".scale", part + ".block_scale"]
        return [name for name in names if name in self._files]

    def _read(self, key: str, part: str) -> QuantizedWeight:
        integers, scales, *blocks = (self._tensor(name) for name in self._names(key, part))
        if WEIGHT_TYPES[self._dtypes[key]].is_packed:
            unpacked = unpack_int4(integers)  # has one extra element if the count is odd
            integers = unpacked[: len(unpacked) // len(scales) * len(scales)].reshape(-1, len(scales))
        return QuantizedWeight(integers, Grid(self._dtypes[key], scales, *blocks))

    def _tensor(self, name: str) -> NDArray[Any]:
        with safe_open(self._files[name], framework="numpy") as file:
            tensor: NDArray[Any] = file.get_tensor(name)
        return tensor


def _content_bytes(path: Path) -> int:
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header
