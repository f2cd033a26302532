"""Neurons of the feed-forward scaled alike: the same logits, a `down_proj` and an inner product that round better.

A factor of a neuron goes into its row of `up_proj`, the inverse into its column of `down_proj`: the product with the
gate is linear in the first (cross-layer equalization, Nagel et al. 2019, arXiv 1906.04721). An output channel of
`down_proj` has one step for all neurons, so its error is smallest if the columns of all neurons reach equally far.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgekv.spec import View
from exporters.checkpoint.fold import EVERY, Floats, Fold, Read

_LEAST = np.float32(1 / 64)  # of the columns' mean range: a floor, so near-zero neurons are not amplified


class NeuronScaling:
    """Folds the factors into the tensors of a decoder.

    Args:
        read: the tensors before, by name and rows.
        scales: factors of layers that are known.
    """

    def __init__(self, read: Read, scales: Mapping[int, Floats] | None = None) -> None:
        self._read = read
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
            self._scales[layer] = self._reach(layer)
        return self._scales[layer]

    def _reach(self, layer: int) -> Floats:
        """`[intermediate]`, how far the columns of `down_proj` reach, relative to their mean."""
        reach = np.abs(self._read(f"model.layers.{layer}.mlp.down_proj.weight", EVERY)).max(axis=0)
        scales: Floats = reach / max(reach.mean(), np.finfo(np.float32).tiny)
        return np.maximum(scales, _LEAST)


def _layer(view: View) -> int:
    assert view.layer is not None, "feed-forwards are parts of layers"
    return view.layer
