"""Outlier channels of the residual, each stored as a fraction of itself: the same logits.

Some models have channels that are hundreds of times larger than all others, at every position: one static range for the
residual then leaves few of its 16 bits to the other channels. A rotation would spread them, but norms behind the blocks
(Gemma, OLMo 2) forbid it. So a channel x stands for n channels x / sqrt(n), as in outlier channel splitting (Zhao et
al. 2019, arXiv 1901.09504): the sum of squares that norms need stays, and the range shrinks by sqrt(n). All n are
equal, so the residual stores one of them and keeps its width; norms of the residual read it n times.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.spec import EMBEDDING, FINAL_NORM, DecoderSpec, SplitChannel, View, views
from exporters.checkpoint.fold import EVERY, Floats, Fold, Read

_OUTLIER = 16.0
"""A channel this many times larger than the median one costs the others four of their 16 bits."""

_MAX_COPIES = 8192  # elements that a norm reads besides the residual: 16 KiB for each token
_ROWS_AT_ONCE = 8192
_POST_NORMS = (
    "post_attention_layernorm.weight",
    "post_feedforward_layernorm.weight",
    "post_per_layer_input_norm.weight",
)
_READS = frozenset({"q", "k", "v", "gate", "up"})


class SplitResidual:
    """Folds the split into the tensors of a decoder with norms behind its blocks.

    Args:
        spec: the decoder before.
        channels: the channels to split, in ascending order.
    """

    def __init__(self, spec: DecoderSpec, channels: Sequence[SplitChannel]) -> None:
        self._pre_norms = spec.pre_norms
        self._after = msgspec.structs.replace(spec, split=tuple(channels))
        self._roots = np.ones(spec.hidden, np.float32)
        for channel in channels:
            self._roots[channel.channel] = np.sqrt(channel.parts)

    @property
    def spec(self) -> DecoderSpec:
        """The decoder after. Its norms add the same epsilon to a mean over more elements; outliers dwarf it."""
        return self._after

    def __call__(self, view: View) -> Fold | None:
        """The fold of a tensor. Roots are powers of 2, so that products and quotients are exact."""
        if view.role == "norm":
            if view.name.endswith(_POST_NORMS):
                return Fold(out_map=1 / self._roots)
            return Fold(out_map=self._final_norm if view.name == FINAL_NORM else self._norm)
        if view.role == "embedding" or (view.role == "head" and self._after.tied_head):
            return Fold(in_map=lambda rows: rows / self._roots)
        reads = view.role == "layer_gate" or (view.role in _READS and not self._pre_norms)
        if reads and view.is_matrix:
            return Fold(in_map=lambda rows: rows * self._roots)
        return None

    def _norm(self, weights: Floats) -> Floats:
        """The weights of a norm of the residual; those of copies are 0: their results are not read."""
        width = len(self._roots) + self._after.copies
        norm = np.zeros(width, np.float32)
        # The mean of squares is over more elements.
        norm[: len(self._roots)] = weights * self._roots * np.sqrt(len(self._roots) / width)
        return norm

    def _final_norm(self, weights: Floats) -> Floats:
        norm = self._norm(weights)
        if self._after.tied_head:
            norm[: len(self._roots)] *= self._roots
        return norm


def outlier_channels(spec: DecoderSpec, read: Read) -> list[SplitChannel]:
    """The channels to split, and into how many: none without norms behind the blocks, or if no channel is an outlier.

    A channel's size follows from the weights: what the embedding and the norms behind the blocks add to it. The largest
    one is halved until none is an outlier, or norms would read too many copies.
    """
    if not spec.post_norms:
        return []
    sizes = _sizes(spec, read)
    most = _OUTLIER * max(float(np.median(sizes)), float(np.finfo(np.float32).tiny))
    halvings, copies = np.zeros(spec.hidden, np.int64), 0
    while True:
        largest = int(np.argmax(sizes))
        copies += 3 * 4 ** int(halvings[largest])
        if not sizes[largest] > most or copies > _MAX_COPIES:  # NaN is refused later, by name
            break
        sizes[largest] /= 2
        halvings[largest] += 1
    return [SplitChannel(channel=int(at), parts=4 ** int(halvings[at])) for at in np.flatnonzero(halvings)]


def _sizes(spec: DecoderSpec, read: Read) -> NDArray[np.float64]:
    """`[hidden]`, how large each channel of the residual may get."""
    sizes = np.zeros(spec.hidden)
    for start in range(0, spec.vocab, _ROWS_AT_ONCE):
        rows = read(EMBEDDING, slice(start, min(start + _ROWS_AT_ONCE, spec.vocab)))
        np.maximum(sizes, np.abs(rows).max(axis=0), out=sizes)
    for view in views(spec):
        if view.name.endswith(_POST_NORMS):
            sizes += np.abs(read(view.name, EVERY))
    return sizes
