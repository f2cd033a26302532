"""What quantizers, graphs and reports ask of a checkpoint, folded or not."""

from __future__ import annotations

from typing import Protocol

from edgekv.spec.decoder import DecoderSpec
from exporters.checkpoint.fold import EVERY, Floats, Rows
from quant import QuantizedWeight


class Tensors(Protocol):
    """A source of a decoder's weights."""

    @property
    def spec(self) -> DecoderSpec:
        """The decoder."""

    def tensor(self, key: str, rows: Rows = EVERY) -> Floats:
        """A tensor as float32, or some of its rows; matrices are `[out, in]`."""

    def integers(self, key: str, rows: slice = EVERY) -> QuantizedWeight:
        """The integers that the checkpoint stores of a matrix, or of some of its output channels.

        The rule of the matrix has the method `stored`.
        """
