"""Transforms of single heads, folded into the weights: the same logits, keys and values that are easier to quantize.

Values: each head's values are rotated by an orthogonal matrix, and `o_proj` undoes it, since attention only sums values
(as QuaRot, Ashkboos et al. 2024, arXiv 2404.00456, does with `v_proj` and `o_proj`).

Keys: both elements of a pair are rotated by the same angle, so one factor for both commutes with the rotary embedding.
Keys are divided and their queries multiplied by it, which leaves every score unchanged. With one step for the whole
head, the error of a score is smallest if all pairs of the keys have the same range.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import KeyScalingName, RecipeRecord, RotationName
from exporters.checkpoint.checkpoint import EVERY, Rows
from exporters.checkpoint.rotate import hadamard, rotated
from exporters.quantize.reference import Floats, Tensors

_PROJECTION = re.compile(r"(model\.layers\.(\d+)\.self_attn\.)([qkvo])_(proj|norm)\.(weight|bias)")
_WIDEST = np.float32(64)  # the maximum factor of a pair


class FoldedHeads:
    """The tensors of a checkpoint with its heads transformed.

    If key heads are normalized, as in Qwen3 and Gemma 3, the norm would undo a factor in the projection. The factor
    goes into the norm's weights instead, and all heads of the layer share it.
    """

    def __init__(self, tensors: Tensors, values: RotationName, keys: KeyScalingName) -> None:
        self._tensors = tensors
        self.spec = tensors.spec
        self.head_key = tensors.head_key
        self._rotation = hadamard(self.spec.head_dim) if values == "hadamard" else None
        self._scales_keys = keys == "pairs"
        self._scales: dict[int, Floats] = {}

    def tensor(self, key: str, rows: Rows = EVERY) -> Floats:
        """As `Checkpoint.tensor`."""
        match = _PROJECTION.fullmatch(key)
        if match is None:
            return self._tensors.tensor(key, rows)
        whole: Floats = self._transformed(match, self._tensors.tensor(key))[rows]
        return whole

    def _transformed(self, match: re.Match[str], stored: Floats) -> Floats:
        layer, part, kind = int(match[2]), match[3], match[4]
        if part == "v" and self._rotation is not None:
            return self._turn_rows(stored)
        if part == "o" and match[5] == "weight" and self._rotation is not None:
            return self._turn_columns(stored)
        if part in "qk" and self._scales_keys and self.spec.qk_norm == (kind == "norm"):
            return self._scale(stored, part, layer)
        return stored

    def _turn_rows(self, stored: Floats) -> Floats:
        """`v_proj`, `[heads * D, hidden]` or `[heads * D]`."""
        heads = stored.reshape(self.spec.kv_heads, self.spec.head_dim, -1)
        turned: Floats = (self._rotation_matrix.T @ heads).reshape(stored.shape)
        return turned

    def _turn_columns(self, stored: Floats) -> Floats:
        """`o_proj`, `[hidden, heads * D]`."""
        heads = stored.reshape(-1, self.spec.head_dim)
        turned: Floats = (heads @ self._rotation_matrix).reshape(stored.shape)
        return turned

    @property
    def _rotation_matrix(self) -> Floats:
        assert self._rotation is not None, "asked for where values are rotated"
        return self._rotation

    def _scale(self, stored: Floats, part: str, layer: int) -> Floats:
        """Rows of queries or keys, or their norm's weights."""
        if layer not in self._scales:
            self._scales[layer] = self._key_scales(layer)
        scales = self._scales[layer]  # [kv_heads, D]; [1, D] for norms
        factors = 1 / scales if part == "k" else scales
        if not self.spec.qk_norm and part == "q":
            factors = np.repeat(factors, self.spec.group, axis=0)
        scaled: Floats = stored * factors.reshape(-1, *[1] * (stored.ndim - 1))
        return scaled

    def _key_scales(self, layer: int) -> Floats:
        """Range of the elements of each head's keys, relative to their mean: `[kv_heads, D]`, or `[1, D]`.

        Estimated from the weights alone, assuming independent normalized inputs of size 1.
        """
        at = f"model.layers.{layer}."
        if self.spec.qk_norm:
            reach = np.square(self._tensors.tensor(at + "self_attn.k_norm.weight")).reshape(1, -1)
        else:
            read = self._tensors.tensor(at + "self_attn.k_proj.weight")
            read = read * self._tensors.tensor(at + "input_layernorm.weight")
            reach = np.square(read).sum(axis=1).reshape(self.spec.kv_heads, -1)
            if "self_attn.k_proj" in self.spec.biased:
                reach += np.square(self._tensors.tensor(at + "self_attn.k_proj.bias")).reshape(reach.shape)
        half = (self.spec.rope_of(layer) or self.spec.rope).width // 2
        pairs = (reach[:, :half] + reach[:, half : 2 * half]) / 2
        reach = np.concatenate([pairs, pairs, reach[:, 2 * half :]], axis=1)
        widths = np.sqrt(np.maximum(reach, np.finfo(np.float32).tiny))
        return _normalized(widths)


def transformed(checkpoint: Tensors, recipe: RecipeRecord) -> Tensors:
    """The checkpoint with a recipe's transforms folded into its weights: the same logits."""
    tensors = rotated(checkpoint, recipe.rotation)
    if recipe.value_rotation == recipe.key_scaling == "none":
        return tensors
    return FoldedHeads(tensors, recipe.value_rotation, recipe.key_scaling)


def _normalized(widths: NDArray[np.float32]) -> Floats:
    """Scale to mean 1 in each head, with a minimum of `1 / _WIDEST`."""
    scales: Floats = widths / widths.mean(axis=1, keepdims=True)
    return np.maximum(scales, 1 / _WIDEST).astype(np.float32)
