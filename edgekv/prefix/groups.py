"""Layers whose rows are stored together in a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgekv.prefix.errors import PrefixError
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
    def kv_heads(self) -> int:
        """Key/value heads of each layer."""
        return self.geometry.kv_heads

    @property
    def head_dim(self) -> int:
        """D of each layer."""
        return self.geometry.head_dim

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, ascending."""
        return self.geometry.numbers or tuple(range(self.geometry.layers))

    @property
    def tensors(self) -> int:
        """Tensors of the group: layers x 2 x kv_heads."""
        return self.geometry.tensors

    def names(self) -> Iterator[KvTensor]:
        """Its tensors, in the order of a block's rows."""
        return self.geometry.names()

    def first_needed(self, tokens: int) -> int:
        """Index of the first of `tokens` past tokens that the next one attends to."""
        return 0 if self.window is None else max(0, tokens - self.window + 1)

    def window_tokens(self, context: int) -> int:
        """Tokens of a full context that this group needs."""
        return context if self.window is None else self.window


def split_layers(geometry: Geometry | LayeredGeometry, windows: Sequence[int] = ()) -> tuple[BlockGroup, ...]:
    """The groups of a geometry, full attention first, then the widest window first.

    Args:
        geometry: the sizes.
        windows: `max_attention_window` of each layer, repeated if shorter; empty for the geometry's own. A window of at
            least the context means full attention.

    Raises:
        PrefixError: a window below 2 tokens, more windows than layers, or windows where the geometry has its own.
    """
    layers, context = geometry.layers, geometry.context
    if len(windows) > layers or any(window < 2 for window in windows):
        expected = f"at most {layers} windows of 2 tokens or more"
        raise PrefixError("max_attention_window", got=list(windows), expected=expected, fix="Correct the list.")
    if windows and isinstance(geometry, LayeredGeometry) and geometry.windows:
        expected = "none, because the model's layers have their own windows"
        raise PrefixError("max_attention_window", got=list(windows), expected=expected, fix="Leave it out.")
    if windows:
        heads = [geometry.kv_heads] if isinstance(geometry, Geometry) else geometry.kv_heads
        widths = [geometry.head_dim] if isinstance(geometry, Geometry) else geometry.head_dim
        geometry = LayeredGeometry(layers, context, heads, widths, windows, geometry.kv_dtype, geometry.key_layout)
    ordered = sorted(geometry.groups(), key=lambda each: (each.context, each.kv_heads, each.head_dim), reverse=True)
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
