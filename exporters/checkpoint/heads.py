"""Transforms of single heads, folded into the weights: the same logits; keys and values that are easier to quantize.

Values: those of each head are rotated by an orthogonal matrix, and the columns of `o_proj` that read them are rotated
back. Attention only adds values up, so the result is the same (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456). Where
every channel has a gate before o_proj, values are not rotated.

Keys: the rotary embedding turns both elements of a pair by one angle, so one factor for both commutes with it. Keys are
divided by the factors and queries multiplied, which keeps every score. With one scale for a head, the error of its
scores is smallest if all pairs have equal magnitudes.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from edgekv.bundle import KeyScalingName, ValueRotationName
from edgekv.spec import DecoderSpec, View, head_width
from exporters.checkpoint.aligned import is_scaled
from exporters.checkpoint.fold import EVERY, Floats, Fold, Read
from exporters.checkpoint.rotate import hadamard

_WIDEST = np.float32(64)  # largest factor of a pair, relative to the mean


class HeadTransforms:
    """Folds transforms of heads into the tensors of a decoder.

    A norm of queries and keys would undo a factor of the projection in front of it, so the factors go into the weights
    of the norm. If it normalizes each head by itself, all heads of the layer share its weights and the factors.

    Args:
        spec: the decoder.
        values: rotation of values.
        keys: scaling of keys.
        read: the tensors before, by name and rows.
    """

    def __init__(self, spec: DecoderSpec, values: ValueRotationName, keys: KeyScalingName, read: Read) -> None:
        self._read = read
        self._spec = spec
        self._rotates = values == "hadamard" and not spec.output_gates
        self._scales_keys = keys != "none"
        self._scales: dict[int, Floats] = {}

    def __call__(self, view: View) -> Fold | None:
        """The fold of a tensor."""
        if self._scales_keys and is_scaled(self._spec, view):
            return Fold(out_map=self._factors(view))
        if not self._rotates or view.role not in ("v", "o"):
            return None
        rotation = hadamard(head_width(self._spec, view.name))
        if view.role == "v":
            return Fold(out_map=partial(_rotated_values, rotation))
        return Fold(in_map=partial(_rotated_back, rotation)) if view.is_matrix else None

    def _factors(self, view: View) -> Floats:
        """What multiplies each row of queries or keys, or each weight of their norm."""
        assert view.layer is not None, "queries and keys are parts of layers"
        owner = self._spec.cache_layer(view.layer)
        if owner not in self._scales:
            self._scales[owner] = self._key_scales(owner)
        scales = self._scales[owner]  # [kv_heads, D]; [1, D] if the heads share a norm
        factors = 1 / scales if view.role in ("k", "k_norm") else scales
        if self._spec.qk_norm_of(view.layer) != "head" and view.role in ("q", "q_norm"):
            factors = np.repeat(factors, self._spec.group(view.layer), axis=0)
        return factors.reshape(-1)

    def _key_scales(self, layer: int) -> Floats:
        """Magnitudes of the elements of each head's keys, relative to their mean: `[kv_heads, D]`, or `[1, D]`.

        They are estimated from the weights, as if the input of k_proj before its norm's weights were independent and of
        variance 1.
        """
        spec, at, kv_heads = self._spec, f"model.layers.{layer}.", self._spec.of_layer(layer).kv_heads
        if qk_norm := spec.qk_norm_of(layer):
            count = 1 if qk_norm == "head" else kv_heads
            power = np.square(self._read(at + "self_attn.k_norm.weight", EVERY)).reshape(count, -1)
        else:
            keys = self._read(at + "self_attn.k_proj.weight", EVERY)
            if spec.pre_norms:
                keys = keys * self._read(at + "input_layernorm.weight", EVERY)
            power = np.square(keys).sum(axis=1).reshape(kv_heads, -1)
            if "self_attn.k_proj" in spec.biased:
                power += np.square(self._read(at + "self_attn.k_proj.bias", EVERY)).reshape(power.shape)
        half = (spec.rope_of(layer) or spec.rope).width // 2
        pairs = (power[:, :half] + power[:, half : 2 * half]) / 2
        power = np.concatenate([pairs, pairs, power[:, 2 * half :]], axis=1)
        widths = np.sqrt(np.maximum(power, np.finfo(np.float32).tiny))
        scales: Floats = widths / widths.mean(axis=1, keepdims=True)
        return np.maximum(scales, 1 / _WIDEST).astype(np.float32)


def _rotated_values(rotation: Floats, stored: Floats) -> Floats:
    """v_proj `[kv_heads * D, hidden]`, or its bias."""
    rotated: Floats = rotation.T @ stored.reshape(-1, len(rotation), stored[0].size)
    return rotated.reshape(stored.shape)


def _rotated_back(rotation: Floats, stored: Floats) -> Floats:
    """Rows of o_proj `[..., heads * D]`."""
    rotated: Floats = stored.reshape(-1, len(rotation)) @ rotation
    return rotated.reshape(stored.shape)
