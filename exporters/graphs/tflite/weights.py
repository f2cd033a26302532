"""The integer weights of a `.tflite` file: quantized once, stored once, shared by its subgraphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgekv.spec.tensors import by_outputs, part_name
from exporters.graphs.tflite.flatbuffer import Subgraph, Tensor
from exporters.quantize.matrices import QuantizedMatrices
from exporters.quantize.reference import Floats
from quant import Encoding, QuantizedWeight, pack_int4


class TfliteWeights:
    """Gives subgraphs their weights: whole matrices, and slices of them for heads."""

    def __init__(
        self,
        tensor: Callable[[str], Floats],
        head_width: Callable[[str], int],
        matrices: QuantizedMatrices,
        *,
        scales_have_gains: bool = False,
    ) -> None:
        """Start without weights.

        Args:
            tensor: reads one by name.
            head_width: of a projection's heads.
            matrices: by name.
            scales_have_gains: whether the scales of matrices include the gains of their products.
        """
        self._tensor = tensor
        self._head_width = head_width
        self._matrices = matrices
        self._scales_have_gains = scales_have_gains
        self._quantized: dict[str, QuantizedWeight] = {}

    def matrix(self, graph: Subgraph, key: str, *, head: int | None, gain: float) -> Tensor:
        """A matrix `[out, in]` with a scale for each output channel, or one head's channels of it."""
        if key not in self._quantized:
            self._quantized[key] = self._matrices[key]
        weight = self._quantized[key]
        name = key
        if head is not None:
            width = self._head_width(key)
            weight = weight.columns(head * width, (head + 1) * width)
            name = f"{key}.h{head}"
        integers, scales = np.ascontiguousarray(by_outputs(weight.integers)), weight.scales
        if not self._scales_have_gains:
            scales = scales * np.float32(gain)
        if weight.grid.type.is_packed:
            return graph.constant(name, "s4", integers.shape, lambda: pack_int4(integers), scales=scales)
        return graph.constant(name, "s8", integers.shape, lambda: integers, scales=scales)

    def table(self, graph: Subgraph, key: str) -> Tensor:
        """A whole tensor in 16 bits with one scale: the embedding table, or the number at the end of a layer."""
        values = self._tensor(key)
        encoding = Encoding.symmetric(float(np.abs(values).max()), "s16")
        return graph.constant(key + ".int16", "s16", values.shape, lambda: encoding.quantize(values), encoding=encoding)

    def bias(self, graph: Subgraph, key: str, *, head: int | None, gain: float) -> Tensor:
        """A bias, or one head's part of it, in 16 bits with one scale."""
        values, name = self._tensor(key), key
        if head is not None:
            width = self._head_width(key)
            values, name = values[head * width : (head + 1) * width], f"{key}.h{head}"
        encoding = Encoding.symmetric(float(np.abs(values).max()), "s16")
        scaled = encoding.times(gain)
        return graph.constant(name, "s16", values.shape, lambda: encoding.quantize(values), encoding=scaled)

    def tap(self, graph: Subgraph, key: str, tap: int) -> Tensor:
        """One element of the kernel of each channel, `[H]`, in 16 bits with one scale."""
        values = np.ascontiguousarray(self._tensor(key)[:, 0, tap])
        encoding = Encoding.symmetric(float(np.abs(values).max()), "s16")
        name = part_name(key, tap=tap)
        return graph.constant(name, "s16", values.shape, lambda: encoding.quantize(values), encoding=encoding)

    def norm(self, graph: Subgraph, key: str, *, gain: float) -> Tensor:
        """A norm's weights times a constant, in float."""
        values = self._tensor(key) * np.float32(gain)
        return graph.constant(key, "f32", values.shape, lambda: values)

    def forget(self) -> None:
        """Free the quantized matrices after every subgraph has used those of a layer."""
        self._quantized.clear()
