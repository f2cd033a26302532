"""Outlier channels of the residual, each represented by several channels: the same logits.

Some models have channels that are hundreds of times larger than all others, at every position: one static range for the
residual then leaves few of its 16 bits to the other channels. A rotation would spread them, but norms behind the blocks
(Gemma, OLMo 2) forbid it. So a channel x becomes n channels x / sqrt(n): the sum of squares that norms need stays, what
reads the channel reads all n, and the range shrinks by sqrt(n) (outlier channel splitting, Zhao et al. 2019, arXiv
1901.09504). Graphs get no new operation; the residual gets wider.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import ChannelRecord
from edgekv.spec import EMBEDDING, DecoderSpec, View, views

Floats = NDArray[np.float32]
Rows = slice | NDArray[np.int64]
Read = Callable[[str, Rows], Floats]

_OUTLIER = 16.0
"""A channel this many times larger than the median one costs the others four of their 16 bits."""

_WIDER = 1 / 8  # of the residual's width may be added
_BLOCK = 128  # the width stays a multiple of what divides it, up to the largest block of weights
_ROWS_AT_ONCE = 8192


class SplitResidual:
    """Folds the split into the tensors of a decoder.

    Args:
        hidden: width of the residual before.
        parts: number of channels that represent a channel, of those that more than one represents.
    """

    def __init__(self, hidden: int, parts: Sequence[ChannelRecord]) -> None:
        counts = np.ones(hidden, np.int64)
        for each in parts:
            counts[each.channel] = each.parts
        self._source = np.repeat(np.arange(hidden), counts)
        self._factors = (1 / np.sqrt(counts))[self._source].astype(np.float32)
        self._share = hidden / len(self._source)

    def spec(self, spec: DecoderSpec) -> DecoderSpec:
        """The decoder with the wider residual. The mean of squares is over more channels, and with it epsilon."""
        return replace(spec, hidden=len(self._source), eps=spec.eps * self._share)

    def tensor(self, view: View, rows: Rows, read: Read) -> Floats:
        """Some rows of a tensor after the split.

        Args:
            view: the tensor before.
            rows: of the tensor after.
            read: the tensors before, by name and rows.
        """
        if view.role == "norm":
            norm: Floats = read(view.name, slice(None))[self._source[rows]]
            norm *= np.float32(np.sqrt(self._share))
            return norm
        if view.writes_residual:
            written: Floats = read(view.name, slice(None))[self._source[rows]]
            written *= self._factors[rows].reshape(-1, *[1] * (written.ndim - 1))
            return written
        values: Floats = read(view.name, rows)
        reads = view.role in ("embedding", "head", "q", "k", "v", "gate", "up") and view.is_matrix
        return values[:, self._source] * self._factors if reads else values


def outlier_channels(spec: DecoderSpec, read: Read) -> list[ChannelRecord]:
    """The channels to split, and into how many: none without norms behind the blocks, or if no channel is an outlier.

    A channel's size follows from the weights: what the embedding and the norms behind the blocks add to it.
    """
    if not spec.post_norms:
        return []
    sizes = _sizes(spec, read)
    ordinary = max(float(np.median(sizes)), float(np.finfo(np.float32).tiny))
    if not sizes.max() > _OUTLIER * ordinary:  # NaN is refused later, by name
        return []
    block = min(spec.hidden & -spec.hidden, _BLOCK)
    counts = np.ones(spec.hidden, np.int64)
    for _ in range(-int(-spec.hidden * _WIDER // block) * block):
        counts[np.argmax(sizes / np.sqrt(counts))] += 1
    return [ChannelRecord(channel=int(at), parts=int(counts[at])) for at in np.flatnonzero(counts > 1)]


def _sizes(spec: DecoderSpec, read: Read) -> NDArray[np.float64]:
    """`[hidden]`, how large each channel of the residual may get."""
    sizes = np.zeros(spec.hidden)
    for start in range(0, spec.vocab, _ROWS_AT_ONCE):
        rows = read(EMBEDDING, slice(start, min(start + _ROWS_AT_ONCE, spec.vocab)))
        np.maximum(sizes, np.abs(rows).max(axis=0), out=sizes)
    for name in _post_norms(spec):
        sizes += np.abs(read(name, slice(None)))
    return sizes


def _post_norms(spec: DecoderSpec) -> list[str]:
    """Names of the norms whose outputs are added to the residual."""
    endings = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
    return [view.name for view in views(spec) if view.name.endswith(endings)]
