"""The matrices of a bundle, as the numbers that its integers stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from edgekv.bundle import Bundle
from exporters.quantize.reference import Floats
from quant import Grid, QuantizedWeight, WeightDtype, unpack_int4, weight_bits


class StoredMatrices:
    """Reads what `exporters.quantize.weights.WeightStore` wrote, a matrix at a time."""

    def __init__(self, bundle: Bundle) -> None:
        """Find the bundle's weights.

        Raises:
            BundleError: its graphs keep their weights elsewhere.
        """
        bundle.require_onnx("the report on layers")
        self._dtypes: dict[str, WeightDtype] = {each.tensor: each.dtype for each in bundle.manifest.recipe.weights}
        self._files: dict[str, Path] = {}
        for path in sorted(bundle.path.glob("weights-*.safetensors")):
            with safe_open(path, framework="numpy") as file:
                self._files |= dict.fromkeys(file.keys(), path)

    def matrix(self, key: str) -> Floats:
        """float32 `[out, in]`; what the export multiplied a matrix by is still in it."""
        parts = [self._read(key, part).dequantize().T for part in self._parts(key)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def bytes(self, key: str) -> int:
        """What the integers and scales of a matrix take."""
        names = [name for part in self._parts(key) for name in self._names(key, part)]
        return sum(self._tensor(name).nbytes for name in names)

    @property
    def total_bytes(self) -> int:
        """What all weights of the bundle take, without the headers of their files."""
        return sum(_content_bytes(path) for path in set(self._files.values()))

    def _parts(self, key: str) -> list[str]:
        """The whole matrix, or each head's channels of it."""
        ending = f".int{weight_bits(self._dtypes[key])}"
        if key + ending in self._files:
            return [key]
        heads = sum(name.startswith(key + ".h") and name.endswith(ending) for name in self._files)
        return [f"{key}.h{head}" for head in range(heads)]

    def _names(self, key: str, part: str) -> list[str]:
        names = [f"{part}.int{weight_bits(self._dtypes[key])}", part + ".scale", part + ".block_scale"]
        return [name for name in names if name in self._files]

    def _read(self, key: str, part: str) -> QuantizedWeight:
        integers, scales, *blocks = (self._tensor(name) for name in self._names(key, part))
        if weight_bits(self._dtypes[key]) == 4:
            unpacked = unpack_int4(integers)  # with one more if their number is odd
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
