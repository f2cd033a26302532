"""Which layers share a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgekv.prefix.errors import PrefixError


@dataclass(frozen=True, slots=True)
class Group:
    """The layers of one attention window and one number of kv heads; their rows lie together in a block.

    Attributes:
        window: tokens that a token attends to, itself included; None is full attention.
        kv_heads: key/value heads of each layer.
        layers: the layers, ascending.
        ranges: their tensors as ranges `[start, stop)` of the order of `Geometry.names()`.
    """

    window: int | None
    kv_heads: int
    layers: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def tensors(self) -> int:
        """Tensors of the group: layers x 2 x kv_heads."""
        return len(self.layers) * 2 * self.kv_heads

    def first_needed(self, tokens: int) -> int:
        """The first of `tokens` past tokens that the next one attends to."""
        return 0 if self.window is None else max(0, tokens - self.window + 1)

    def window_tokens(self, context: int) -> int:
        """Tokens of a full context that this group needs."""
        return context if self.window is None else self.window


def split_layers(kv_heads: Sequence[int], windows: Sequence[int], context: int) -> tuple[Group, ...]:
    """One group for each combination of attention window and kv heads, full attention first, widest window first.

    Args:
        kv_heads: of each layer.
        windows: `max_attention_window`: of each layer, repeated over the layers if it is shorter; empty is full
            attention everywhere. A window of at least the context is full attention.
        context: S.

    Raises:
        PrefixError: a window below 2 tokens, or more windows than layers.
    """
    if len(windows) > len(kv_heads) or any(window < 2 for window in windows):
        wanted = f"at most {len(kv_heads)} windows of 2 tokens or more"
        raise PrefixError("max_attention_window", found=list(windows), wanted=wanted, way_out="Mend the list.")
    layers: dict[tuple[int, int], list[int]] = {}
    starts = [0]
    for layer, heads in enumerate(kv_heads):
        window = min(windows[layer % len(windows)], context) if windows else context
        layers.setdefault((window, heads), []).append(layer)
        starts.append(starts[-1] + 2 * heads)
    groups = []
    for (window, heads), members in sorted(layers.items(), reverse=True):
        ranges: list[tuple[int, int]] = []
        for layer in members:
            start = ranges.pop()[0] if ranges and ranges[-1][1] == starts[layer] else starts[layer]
            ranges.append((start, starts[layer + 1]))
        groups.append(Group(None if window == context else window, heads, tuple(members), tuple(ranges)))
    return tuple(groups)
