"""Neurons of the feed-forward scaled alike: the same logits, a `down_proj` and an inner product that round better.

A factor of a neuron goes into its row of `up_proj`, the inverse into its column of `down_proj`: the product with the
gate is linear in the first (cross-layer equalization, Nagel et al. 2019, arXiv 1906.04721). An output channel of
`down_proj` has one step for all neurons, or for a block of them, so its error is smallest if the columns of all neurons
are alike: reach equally far in 8 bits, which represent every weight, and have the same norm in 4 bits, which clip the
largest. The row of `up_proj` has steps of its own, so a factor changes nothing there, except for its sign: integers of
4 bits go from -8 to 7, so the side with the larger weights is to be the negative one.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgekv.bundle import NeuronScalingName
from edgekv.spec import DecoderSpec, View
from exporters.checkpoint.fold import EVERY, Floats, Fold, Read

_LEAST = np.float32(1 / 64)  # of the mean column: a floor, so near-zero neurons are not amplified


def applied_scaling(spec: DecoderSpec, asked: NeuronScalingName) -> NeuronScalingName:
    """The scaling that a decoder can have: none without gates, so that no product is linear in a factor.

    Neurons of experts are not scaled.
    """
    is_dense = any(not spec.has_experts(layer) for layer in spec.own_layers)
    return asked if spec.gated and is_dense else "none"


class NeuronScaling:
    """Folds the factors into the tensors of a decoder.

    Args:
        read: the tensors before, by name and rows.
        name: `equal` or `norm`.
        scales: factors of layers that are known.
    """

    def __init__(self, read: Read, name: NeuronScalingName, scales: Mapping[int, Floats] | None = None) -> None:
        self._read = read
        self._name = name
        self._scales = dict(scales or {})

    def __call__(self, view: View) -> Fold | None:
        """The fold of a tensor; a bias of `down_proj` stays."""
        if view.role == "up":
            return Fold(out_map=self.scales(_layer(view)))
        if view.role == "down" and view.is_matrix:
            scales = self.scales(_layer(view))
            return Fold(in_map=lambda stored: np.divide(stored, scales, out=stored))
        return None

    def scales(self, layer: int) -> Floats:
        """The factor of each neuron, `[intermediate]`."""
        if layer not in self._scales:
            down = self._read(f"model.layers.{layer}.mlp.down_proj.weight", EVERY)
            if self._name == "equal":
                self._scales[layer] = _relative(np.abs(down).max(axis=0))
            else:
                up = self._read(f"model.layers.{layer}.mlp.up_proj.weight", EVERY)
                self._scales[layer] = _relative(np.linalg.norm(down, axis=0)) * _signs(up)
        return self._scales[layer]


def _relative(sizes: Floats) -> Floats:
    """`[intermediate]`, sizes of columns relative to their mean."""
    scales: Floats = sizes / max(sizes.mean(), np.finfo(np.float32).tiny)
    return np.maximum(scales, _LEAST)


def _signs(up: Floats) -> Floats:
    """`[intermediate]`, 1 or -1: with it a row `[hidden]` of `up_proj` has its largest weights below 0."""
    largest = np.maximum(np.abs(up).max(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    scaled = up / largest
    squares = np.square(scaled)
    moments = np.einsum("nh,nh->n", np.square(squares), scaled)  # of order 5
    return np.where(moments > 0, np.float32(-1), np.float32(1))


def _layer(view: View) -> int:
    assert view.layer is not None, "feed-forwards are parts of layers"
    return view.layer
