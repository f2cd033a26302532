"""Layers whose rows are stored together in a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgekv.spec.geometry import Geometry, KvTensor
from edgekv.spec.layers import LayeredGeometry


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """The layers of one attention window, number of heads and head width.

    Attributes:
        geometry: of these layers; its `context` is their window, or S for full attention.
        window: tokens that a token attends to, including itself; None for full attention.
        ranges: ranges `[start, stop)` of their tensors among all tensors, ordered by layer, keys before values, by
            head.
    """

    geometry: Geometry
    window: int | None
    ranges: tuple[tuple[int, int], ...]

    @property
    def tensors(self) -> int:
        """Tensors of the group: layers x 2 x kv_heads."""
        return self.geometry.tensors

    @property
    def head_dim(self) -> int:
        """D of each layer."""
        return self.geometry.head_dim

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, ascending."""
        return self.geometry.numbers or tuple(range(self.geometry.layers))

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's rows in all tensors."""
        return self.geometry.tensors * self.geometry.row_bytes

    def names(self) -> Iterator[KvTensor]:
        """Its tensors, in the order of a block's rows."""
        return self.geometry.names()

    def first_needed(self, tokens: int) -> int:
        """Index of the first of `tokens` past tokens that the next one attends to."""
        return 0 if self.window is None else max(0, tokens - self.window + 1)

    def shape(self, tokens: int) -> tuple[int, int, int]:
        """Shape of the rows of so many tokens."""
        return self.tensors, tokens, self.head_dim


def split_layers(geometry: Geometry | LayeredGeometry) -> tuple[BlockGroup, ...]:
    """The groups of a geometry that have rows, full attention first, then the widest window first."""
    context = geometry.context
    attending = (each for each in geometry.groups() if not each.is_state)
    ordered = sorted(attending, key=lambda each: (each.context, each.kv_heads, each.head_dim), reverse=True)
    return tuple(
        BlockGroup(each, None if each.context == context else each.context, ranges)
        for each, ranges in zip(ordered, _ranges(ordered), strict=True)
    )


def _ranges(groups: Sequence[Geometry]) -> list[tuple[tuple[int, int], ...]]:
    """Ranges of each group's tensors among all tensors."""
    everything = sorted(((name, number) for number, group in enumerate(groups) for name in group.names()), key=_order)
    ranges: list[list[tuple[int, int]]] = [[] for _ in groups]
    for place, (_, number) in enumerate(everything):
        if ranges[number] and ranges[number][-1][1] == place:
            ranges[number][-1] = (ranges[number][-1][0], place + 1)
        else:
            ranges[number].append((place, place + 1))
    return [tuple(each) for each in ranges]


def _order(entry: tuple[KvTensor, int]) -> tuple[int, bool, int]:
    tensor = entry[0]
    return tensor.layer, tensor.kind == "value", tensor.head
