"""Layers whose rows are stored together in a block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgekv.spec.geometry import Geometry, KvTensor
from edgekv.spec.layers import LayeredGeometry


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """The layers of one attention window, number of heads and head width.

    Attributes:
        geometry: of these layers; its `context` is their window, or S for full attention.
        window: tokens that a token attends to, including itself; None for full attention.
    """

    geometry: Geometry
    window: int | None

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, ascending."""
        return self.geometry.numbers or tuple(range(self.geometry.layers))

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's rows in all tensors."""
        return self.geometry.tensors * self.geometry.row_bytes

    def names(self) -> Iterator[KvTensor]:
        """Its tensors, in the order of a block's rows: by layer, keys before values, by head."""
        return self.geometry.names()

    def shape(self, tokens: int) -> tuple[int, int, int]:
        """Shape of the rows of so many tokens: `[tensors, tokens, D]`."""
        return self.geometry.tensors, tokens, self.geometry.head_dim

    def first_needed(self, tokens: int) -> int:
        """Index of the first of `tokens` past tokens that the next one attends to."""
        return 0 if self.window is None else max(0, tokens - self.window + 1)


def split_layers(geometry: Geometry | LayeredGeometry) -> tuple[BlockGroup, ...]:
    """The groups of a geometry that have rows, full attention first, then the widest window first."""
    attending = [each for each in geometry.groups() if not each.is_state]
    ordered = sorted(attending, key=lambda each: (each.context, each.kv_heads, each.head_dim), reverse=True)
    return tuple(BlockGroup(each, None if each.context == geometry.context else each.context) for each in ordered)
