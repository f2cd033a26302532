"""Which layers share a pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgekv.prefix.errors import PrefixError
from edgekv.spec.geometry import KINDS, Geometry, KvTensor
from edgekv.spec.layers import LayeredGeometry


@dataclass(frozen=True, slots=True)
class Group:
    """The layers of one attention window, one number of kv heads and one width; their rows lie together in a block.

    Attributes:
        window: tokens that a token attends to, itself included; None is full attention.
        kv_heads: key/value heads of each layer.
        head_dim: D of each layer.
        layers: the layers, ascending.
        ranges: their tensors as ranges `[start, stop)` of the order of all tensors: by layer, keys before values, by
            head.
    """

    window: int | None
    kv_heads: int
    head_dim: int
    layers: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def tensors(self) -> int:
        """Tensors of the group: layers x 2 x kv_heads."""
        return len(self.layers) * 2 * self.kv_heads

    def names(self) -> Iterator[KvTensor]:
        """Its tensors, in the order of a block's rows."""
        return (KvTensor(layer, kind, head) for layer in self.layers for kind in KINDS for head in range(self.kv_heads))

    def first_needed(self, tokens: int) -> int:
        """The first of `tokens` past tokens that the next one attends to."""
        return 0 if self.window is None else max(0, tokens - self.window + 1)

    def window_tokens(self, context: int) -> int:
        """Tokens of a full context that this group needs."""
        return context if self.window is None else self.window


def split_layers(geometry: Geometry | LayeredGeometry, windows: Sequence[int] = ()) -> tuple[Group, ...]:
    """One group for each combination of window, kv heads and width, full attention first, widest window first.

    Args:
        geometry: the sizes.
        windows: `max_attention_window`: of each layer, repeated over the layers if it is shorter; empty is what the
            geometry says, full attention where it says nothing. A window of at least the context is full attention.

    Raises:
        PrefixError: a window below 2 tokens, more windows than layers, or windows where the geometry has its own.
    """
    layers, context = geometry.layers, geometry.context
    if len(windows) > layers or any(window < 2 for window in windows):
        wanted = f"at most {layers} windows of 2 tokens or more"
        raise PrefixError("max_attention_window", got=list(windows), expected=wanted, fix="Mend the list.")
    heads: Sequence[int] = [geometry.kv_heads] if isinstance(geometry, Geometry) else geometry.kv_heads
    widths: Sequence[int] = [geometry.head_dim] if isinstance(geometry, Geometry) else geometry.head_dim
    own: Sequence[int | None] = () if isinstance(geometry, Geometry) else geometry.windows
    if windows and own:
        wanted = "none, since the model's layers have windows of their own"
        raise PrefixError("max_attention_window", got=list(windows), expected=wanted, fix="Leave it out.")
    limits = [context if window is None else min(window, context) for window in windows or own or (None,)]
    members: dict[tuple[int, int, int], list[int]] = {}
    starts = [0]
    for layer in range(layers):
        kv_heads = heads[layer % len(heads)]
        sizes = (limits[layer % len(limits)], kv_heads, widths[layer % len(widths)])
        members.setdefault(sizes, []).append(layer)
        starts.append(starts[-1] + 2 * kv_heads)
    groups = []
    for (window, kv_heads, head_dim), alike in sorted(members.items(), reverse=True):
        ranges: list[tuple[int, int]] = []
        for layer in alike:
            start = ranges.pop()[0] if ranges and ranges[-1][1] == starts[layer] else starts[layer]
            ranges.append((start, starts[layer + 1]))
        groups.append(Group(None if window == context else window, kv_heads, head_dim, tuple(alike), tuple(ranges)))
    return tuple(groups)
