"""One pass over the decoder that quantizes each matrix where it is met, on the inputs that it will really have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from exporters.decoder import decoder_layer, logits
from exporters.recipe import Recipe
from exporters.reference import Floats, NumpyOps, Tensors, Weights
from quant import Grid, LayerInputs, QuantizedWeight, Range, quantize


class QuantizedMatrices:
    """Quantized matrices in files of a folder, by name, so that none needs to stay in memory."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self._folder = folder
        self._recipe = recipe

    def __getitem__(self, key: str) -> QuantizedWeight:
        parts = load_file(self._path(key))
        grid = Grid(self._recipe.rule(key).dtype, parts["scales"], parts.get("block_scales"))
        return QuantizedWeight(parts["integers"], grid)

    def __setitem__(self, key: str, weight: QuantizedWeight) -> None:
        parts: dict[str, NDArray[Any]] = {"integers": weight.integers, "scales": weight.grid.scales}
        if weight.grid.block_scales is not None:
            parts["block_scales"] = weight.grid.block_scales
        save_file(parts, self._path(key))

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.safetensors"


class QuantizingOps(NumpyOps):
    """Carries out the exact decoder and the quantized one side by side, on all windows: `[2, windows, T, width]`.

    Before a matrix is used for the first time it is quantized, so its inputs are those that the integers upstream
    give. Ranges are those of the quantized decoder.
    """

    def __init__(
        self, tensors: Tensors, recipe: Recipe, matrices: QuantizedMatrices, tokens: int, context: int
    ) -> None:
        self.exact = Weights(tensors)
        self.ranges: dict[str, Range] = {}
        super().__init__(tensors.spec, self.exact, tokens, context, self._widen)
        self._recipe = recipe
        self._matrices = matrices
        self._quantized: dict[str, Floats] = {}
        self._inputs: tuple[Floats, LayerInputs] | None = None

    def embed(self, tokens: NDArray[Any], name: str) -> Floats:
        """Rows of the embedding for ids `[windows, T]`."""
        rows = self.exact["model.embed_tokens.weight"][tokens]
        return self._seen(name, np.stack([rows, rows]))

    def linear(
        self,
        x: Floats,
        weight: str,
        name: str,
        *,
        bias: str | None = None,
        head: int | None = None,
        gain: float = 1.0,
    ) -> Floats:
        self.quantize(weight, x)
        width = self._spec.head_dim
        rows = slice(None) if head is None else slice(head * width, (head + 1) * width)
        both = (self.exact[weight][rows], self._quantized[weight][rows])
        product = np.stack([each @ matrix.T for each, matrix in zip(x, both, strict=True)])
        product *= np.float32(gain)
        if bias is None:
            return self._seen(name, product)
        product = self._seen(name + ".unbiased", product)
        return self._seen(name, product + self.exact[bias][rows] * np.float32(gain))

    def quantize(self, weight: str, x: Floats) -> None:
        """Quantize a matrix whose inputs are `x`, unless that was done."""
        if weight in self._quantized:
            return
        rule = self._recipe.rule(weight)
        inputs = None if rule.method == "nearest" else self._inputs_of(x)
        integers = quantize(self.exact[weight].T, rule.dtype, rule.method, inputs)
        self._matrices[weight] = integers
        self._quantized[weight] = integers.dequantize().T

    def drop(self) -> None:
        """Forget the weights that were used."""
        self.exact.drop()
        self._quantized.clear()
        self._inputs = None

    def _inputs_of(self, x: Floats) -> LayerInputs:
        """Matrices that share their inputs share what is known of them."""
        if self._inputs is None or self._inputs[0] is not x:
            self._inputs = None
            exact, quantized = (each.reshape(-1, x.shape[-1]) for each in x)
            self._inputs = (x, LayerInputs.of(exact, quantized))
        return self._inputs[1]

    def _widen(self, name: str, values: Floats) -> None:
        keep = name.startswith("past_")
        for window in values[1]:
            self.ranges.setdefault(name, Range()).observe(window, keep_sample=keep)


def quantize_decoder(
    tensors: Tensors,
    windows: Sequence[NDArray[Any]],
    context: int,
    recipe: Recipe,
    matrices: QuantizedMatrices,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Range]:
    """Quantize every matrix, and say what values every result takes in the quantized decoder.

    Args:
        tensors: the exact weights.
        windows: token ids of the calibration text, all of one length T.
        context: the longest sequence that the rotary embedding is made for.
        recipe: what becomes of each matrix.
        matrices: where the integers go.
        progress: called with the number of layers done.
    """
    tokens = np.stack(windows)
    spec = tensors.spec
    ops = QuantizingOps(tensors, recipe, matrices, tokens.shape[1], context)
    states = ops.embed(tokens, "embedding")
    for layer in range(spec.layers):
        ops.drop()
        states = decoder_layer(ops, spec, layer, states)
        if progress is not None:
            progress(layer + 1)
    ops.drop()
    ops.quantize(tensors.head_key, ops.rms_norm(states, "model.norm.weight", "final_norm"))
    for window in range(len(windows)):
        logits(ops, spec, tensors.head_key, states[:, window : window + 1])
    return ops.ranges
