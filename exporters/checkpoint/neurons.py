"""Neurons of the feed-forward scaled alike: the same logits, a `down_proj` and an inner product that round better.

A factor of a neuron goes into its row of `up_proj`, the inverse into its column of `down_proj`: the product with the
gate is linear in the first (cross-layer equalization, Nagel et al. 2019, arXiv 1906.04721). An output channel of
`down_proj` has one step for all neurons, so its error is smallest if the columns of all neurons reach equally far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from edgekv.spec import DecoderSpec, View
from exporters.checkpoint.checkpoint import EVERY, Rows
from exporters.checkpoint.factors import Factors
from exporters.checkpoint.rotate import Floats, Read

_LEAST = np.float32(1 / 64)  # of the mean reach of columns: a neuron that writes almost nothing is not blown up


class NeuronScaling:
    """Folds the factors into the tensors of a decoder.

    Args:
        spec: the decoder.
        read: the tensors before, by name and rows.
        scales: factors of layers that are known.
    """

    def __init__(self, spec: DecoderSpec, read: Read, scales: Mapping[int, Floats] | None = None) -> None:
        self._spec = spec
        self._read = read
        self._scales = dict(scales or {})

    def changes(self, view: View) -> bool:
        """Whether the tensor is another one after the scaling; a bias of `down_proj` is not."""
        return view.role == "up" or (view.role == "down" and view.is_matrix)

    def change(self, view: View, change: Factors) -> Factors:
        """A change of a matrix after the scaling, one that it changes."""
        assert view.layer is not None, "feed-forwards are parts of layers"
        scales = self.scales(view.layer)
        if view.role == "up":
            return replace(change, left=change.left * scales[:, None])
        return replace(change, right=change.right / scales)

    def tensor(self, view: View, rows: Rows) -> Floats:
        """Some rows of a tensor after the scaling, one that it changes."""
        assert view.layer is not None, "feed-forwards are parts of layers"
        scales, stored = self.scales(view.layer), self._read(view.name, rows)
        if view.role == "up":  # [intermediate, hidden], or its bias [intermediate]
            stored *= scales[rows].reshape(-1, *[1] * (stored.ndim - 1))
        else:
            stored /= scales
        return stored

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
